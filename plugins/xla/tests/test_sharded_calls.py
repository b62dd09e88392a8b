"""Calls on sharded arrays, outside of ``shard_map``: values, gradients, collectives, and the shapes that kernels get.

Each kernel here is one of XLA's behind a custom call, which the compiler cannot partition, like those of Triton and
Pallas: it solves a triangular system with the identity.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_xla.flash_attention
import ejkernel_xla.flash_attention.backward
import ejkernel_xla.norms
from ejkernel_core import Operation, PluginError, Registry, hookimpl

KINDS = (AxisType.Auto, AxisType.Explicit)
B, T, S, D = 4, 24, 40, 8


def through_custom_call(array: jax.Array) -> jax.Array:
    """The same numbers, from a custom call on all of the array."""
    columns = array.reshape(-1, array.shape[-1]).T
    solved = jax.lax.linalg.triangular_solve(jnp.eye(len(columns)), columns, left_side=True, lower=True)
    return solved.T.reshape(array.shape)


def opaque_kernel(module: Any, shapes: list[Any]) -> Any:
    @hookimpl
    def heuristic_cfg(inv: Any) -> Any:
        return getattr(module, "heuristic_cfg", lambda inv: None)(inv)

    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        arrays = {name: array for name, array in inv.items() if isinstance(array, jax.Array)}
        shapes.append((inv.op, {name: array.shape for name, array in arrays.items()}))
        large = {n: through_custom_call(a) for n, a in arrays.items() if a.dtype == jnp.float32 and a.ndim > 2}
        return module.run_backend(inv.with_arrays(large), cfg)

    config = {"Config": module.Config} if hasattr(module, "Config") else {}
    return SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend, OPAQUE=("cpu",), **config)


@pytest.fixture
def registry(opaque_registry: Any) -> Any:
    opaque_registry.shapes.clear()
    return opaque_registry


@pytest.fixture(scope="module")
def opaque_registry() -> Any:
    """A registry with these kernels alone, and the shapes that they got in ``shapes``."""
    registry, shapes = Registry(plugins="ejkernel-ops"), []
    for name, module in (
        ("flash_attention", ejkernel_xla.flash_attention),
        ("flash_attention_bwd", ejkernel_xla.flash_attention.backward),
        ("rms_norm", ejkernel_xla.norms.rms_norm),
        ("rms_norm_bwd", ejkernel_xla.norms.rms_norm_bwd),
    ):
        registry.register(opaque_kernel(module, shapes), f"{name}.opaque")
    registry.shapes = shapes
    return registry


def mesh_of(kind: AxisType) -> Any:
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))


def compiled(function: Callable[..., Any], *arrays: Any) -> Any:
    """The program for these arrays, which is compiled once to be run and read."""
    return jax.jit(function).lower(*arrays).compile()


def collectives(program: Any) -> dict[str, int]:
    """The collectives in a compiled program, by name."""
    text = program.as_text()
    pattern = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    return dict(Counter(re.findall(pattern, text)))


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5), actual, expected)


@attrs.frozen
class Case:
    """A call, how its arrays are sharded, and what is expected."""

    specs: dict[str, P]
    #: The shapes of some arrays on a shard.
    shard: dict[str, tuple[int, ...]]
    heads: tuple[int, int] = (8, 4)
    arrays: dict[str, Any] = attrs.field(factory=dict)
    options: dict[str, Any] = attrs.field(factory=dict)
    forward: dict[str, int] = attrs.field(factory=dict)
    #: The sums of gradients, each in one collective or combined in one; and what a replicated gradient asks for.
    sums: int = 0
    gathers: int = 0
    operation: str = "flash_attention"


SAME = ("query", "key", "value")
CAUSAL = {"causal": True}
CASES = {
    "batch": Case(dict.fromkeys(SAME, P("x")), {"query": (2, T, 8, D)}, options=CAUSAL),
    "heads": Case(
        dict.fromkeys(SAME, P(None, None, "y")), {"query": (B, T, 2, D), "key": (B, S, 1, D)}, options=CAUSAL
    ),
    "batch and heads": Case(
        dict.fromkeys(SAME, P("x", None, "y")), {"query": (2, T, 2, D), "key": (2, S, 1, D)}, options=CAUSAL
    ),
    "key heads alone": Case(
        {"key": P(None, None, "y"), "value": P(None, None, "y")}, {"query": (B, T, 2, D)}, options=CAUSAL
    ),
    "heads finer than key heads, by a mesh axis each": Case(
        {"query": P(None, None, ("x", "y")), "key": P(None, None, "x"), "value": P(None, None, "x")},
        {"query": (B, T, 1, D), "key": (B, S, 1, D)},
        heads=(8, 2),
        sums=1,
    ),
    "heads finer than key heads, by one mesh axis": Case(
        {"query": P("x", None, "y")}, {"query": (2, T, 2, D), "key": (2, S, 1, D)}, heads=(8, 2), options=CAUSAL, sums=1
    ),
    "one key head": Case(
        {"query": P(None, None, "y")}, {"query": (B, T, 2, D), "key": (B, S, 1, D)}, heads=(8, 1), sums=1
    ),
    "rows without a mask": Case({"query": P("x", "y")}, {"query": (2, 6, 8, D), "key": (2, S, 4, D)}, sums=1),
    "replicated keys": Case({"query": P("x")}, {"query": (2, T, 8, D), "key": (2, S, 4, D)}, options=CAUSAL),
    "a bias of batch 1": Case(
        {**dict.fromkeys(SAME, P("x", None, "y")), "bias": P(None, "y")},
        {"query": (2, T, 2, D), "bias": (1, 2, T, S)},
        arrays={"bias": (1, 8, T, S)},
        sums=1,
    ),
    "a bias of rows": Case(
        {"query": P("x", "y"), "bias": P("x", None, "y")},
        {"query": (2, 6, 8, D), "bias": (2, 1, 6, S)},
        arrays={"bias": (B, 1, T, S)},
        sums=1,
    ),
    "sinks": Case(
        {**dict.fromkeys(SAME, P("x", None, "y")), "softmax_aux": P("y")},
        {"query": (2, T, 2, D), "softmax_aux": (2, 3)},
        arrays={"softmax_aux": (8, 3)},
        options=CAUSAL,
        sums=1,
    ),
    "segment ids": Case(
        dict.fromkeys((*SAME, "q_segment_ids", "kv_segment_ids"), P("x")),
        {"query": (2, T, 8, D), "q_segment_ids": (2, T), "kv_segment_ids": (2, S)},
        arrays={"q_segment_ids": (B, T), "kv_segment_ids": (B, S)},
    ),
    "a cache of lengths": Case(
        {**dict.fromkeys(SAME, P("x", None, "y")), "kv_lengths": P("x")},
        {"query": (2, T, 2, D), "kv_lengths": (2,), "q_start": (2,)},
        arrays={"kv_lengths": (B,)},
        options=CAUSAL,
    ),
    "a cache of one length": Case(
        dict.fromkeys(SAME, P("x", None, "y")),
        {"query": (2, T, 2, D), "kv_lengths": (2,), "q_start": (2,)},
        arrays={"kv_lengths": ()},
        options={**CAUSAL, "sliding_window": (5, 0)},
    ),
    "a ring": Case(
        {**dict.fromkeys(SAME, P("x", None, "y")), "kv_positions": P("x"), "q_start": P("x")},
        {"query": (2, T, 2, D), "kv_positions": (2, S), "q_start": (2,)},
        arrays={"kv_positions": (B, S), "q_start": (B,)},
        options=CAUSAL,
    ),
    "rows that see all of a cache": Case(
        {"query": P("x", "y"), "kv_lengths": P("x")},
        {"query": (2, 6, 8, D), "key": (2, S, 4, D), "kv_lengths": (2,)},
        arrays={"kv_lengths": (B,)},
        sums=1,
    ),
    "rows with positions under a mask": Case(
        {"query": P(None, "y")},
        {"query": (B, T, 8, D), "q_start": (B,)},
        arrays={"q_start": (B,)},
        options=CAUSAL,
        forward={"all-gather": 1},
        gathers=9,
    ),
    "rows under a mask": Case(
        {"query": P(None, "y")}, {"query": (B, T, 8, D)}, options=CAUSAL, forward={"all-gather": 1}, gathers=9
    ),
    "keys": Case(
        {"key": P(None, "y")}, {"query": (B, T, 8, D), "key": (B, S, 4, D)}, forward={"all-gather": 1}, gathers=9
    ),
    "dropout": Case(
        dict.fromkeys(SAME, P("x")),
        {"query": (B, T, 8, D)},
        options={"dropout_prob": 0.25, "dropout_seed": 3},
        forward={"all-gather": 3},
        gathers=9,
    ),
    "rows of a norm": Case({"x": P("x", "y")}, {"x": (2, 6, 16)}, operation="rms_norm", sums=1),
    "the length of a row of a norm": Case(
        {"x": P("x", None, "y")}, {"x": (2, T, 16)}, operation="rms_norm", forward={"all-gather": 1}, sums=1, gathers=9
    ),
}


def arrays_of(case: Case) -> dict[str, jax.Array]:
    heads, kv_heads = case.heads
    shapes: dict[str, Any] = {"query": (B, T, heads, D), "key": (B, S, kv_heads, D), "value": (B, S, kv_heads, D)}
    if case.operation == "rms_norm":
        shapes = {"x": (B, T, 16), "weight": (16,), "bias": (16,)}
    shapes |= case.arrays
    keys = jax.random.split(jax.random.key(1), len(shapes))
    highest = {"q_segment_ids": 3, "kv_segment_ids": 3, "kv_lengths": S, "kv_positions": S, "q_start": S - T}
    return {
        name: jax.random.randint(key, shape, 0, highest[name]) if name in highest else jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def call(registry: Any, case: Case, arrays: dict[str, Any]) -> Any:
    options = case.options | ({"return_lse": True} if case.operation == "flash_attention" else {})
    return registry.call(case.operation, **arrays, **options)


def pullback(function: Any, arrays: dict[str, Any]) -> Any:
    """The results, and the gradients of the floating arrays for cotangents that differ."""
    floats = {name: array for name, array in arrays.items() if array.dtype == jnp.float32}
    results, vjp = jax.vjp(lambda differentiated: function(arrays | differentiated), floats)
    return results, vjp(jax.tree.map(lambda r: jnp.cos(3 * r), results))[0]


def place(arrays: dict[str, jax.Array], specs: dict[str, P], mesh: Any) -> dict[str, jax.Array]:
    return {name: jax.device_put(a, NamedSharding(mesh, specs.get(name, P()))) for name, a in arrays.items()}


def shapes_of_runs(registry: Any) -> dict[str, dict[str, Any]]:
    """By operation: the shapes that its kernel got since the last time. It got the same each time it ran."""
    shapes: dict[str, dict[str, Any]] = {}
    for op, arrays in registry.shapes:
        assert shapes.setdefault(op, arrays) == arrays
    registry.shapes.clear()
    return shapes


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", CASES)
def test_values_gradients_and_collectives(registry: Any, name: str, kind: AxisType) -> None:
    case, mesh = CASES[name], mesh_of(kind)
    arrays, function = arrays_of(case), partial(call, registry, case)
    expected = jax.jit(partial(pullback, function))(arrays)
    shapes_of_runs(registry)
    with jax.set_mesh(mesh):
        sharded = place(arrays, case.specs, mesh)
        assert_close(function(sharded), expected[0])
        program = compiled(function, sharded)
        assert_close(program(sharded), expected[0])
        assert collectives(program) == case.forward
        program = compiled(partial(pullback, function), sharded)
        assert_close(program(sharded), expected)
        counts = collectives(program)
    assert counts.pop("all-reduce", 0) in ((0,) if not case.sums else (1, 2, 3))
    # A gradient that is sharded is gathered only where its array is replicated, because its type is the array's.
    replicated = sum(case.specs.get(name, P()) == P() for name in arrays)
    assert counts.pop("all-gather", 0) <= case.gathers + (
        replicated if kind is AxisType.Explicit or case.heads[1] == 2 else 0
    )
    assert not counts
    for shapes in shapes_of_runs(registry).values():
        assert shapes.items() >= case.shard.items()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_result_has_the_sharding_that_follows(registry: Any, kind: AxisType) -> None:
    case, mesh = CASES["batch and heads"], mesh_of(kind)
    with jax.set_mesh(mesh):
        sharded = place(arrays_of(case), case.specs, mesh)
        (out, lse), gradients = jax.jit(partial(pullback, partial(call, registry, case)))(sharded)
    assert out.sharding.spec[0:3] == ("x", None, "y")
    assert lse.sharding.spec[0:2] == ("x", "y")
    assert {gradient.sharding.spec[0:3] for gradient in gradients.values()} == {("x", None, "y")}


# -- explanations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_explanation_says_what_is_gathered_and_why(registry: Any, kind: AxisType) -> None:
    def division(name: str, **specs: P) -> Any:
        case = CASES[name]
        sharded = place(arrays_of(case), case.specs | specs, mesh_of(kind))
        explanation = registry.explain(case.operation, **sharded, **case.options)
        query = explanation.plan.invocation.get("query", explanation.plan.invocation.get("x"))
        assert query.shape == next(iter(case.shard.values()))
        assert str(explanation.division) in str(explanation)
        assert explanation.backward.plan.invocation["wrt"]
        return explanation.division

    whole = division("rows under a mask")
    assert (whole.devices, whole.shards) == (8, None)
    assert [str(gather) for gather in whole.gathers] == [
        "gathered: axis 1 (q_len) of query, sharded over 'y': each device needs it whole"
    ]
    assert "depends on their place in the whole call" in str(division("dropout"))
    assert str(division("batch and heads")) == (
        "on 8 devices: each computes its shard, batch over 'x', kv_heads over 'y'"
    )
    assert "heads over 'y'" in str(division("heads finer than key heads, by one mesh axis"))
    assert division("batch").gathers == ()
    assert "'y' shards kv_heads here" in str(division("heads", key=P("y", None, None)).gathers[0])


def test_an_explanation_says_where_the_compiler_partitions_the_kernel() -> None:
    case, mesh = CASES["batch"], mesh_of(AxisType.Auto)
    arrays = place(arrays_of(case), case.specs, mesh)
    explanation = Registry().explain("flash_attention", **arrays, backend="xla")
    assert explanation.plan.invocation["query"].shape == (B, T, 8, D)
    assert "the compiler partitions the kernel" in str(explanation)


# -- transformations ---------------------------------------------------------------------------------------------------


def sharded_vmap(registry: Any, options: dict[str, Any]) -> Any:
    def attend(query: Any, key: Any, value: Any) -> Any:
        return registry.call("flash_attention", query, key, value, **options)

    return jax.vmap(attend, (0, 0, None))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("x", "y"), P("y", None, None, "x")], ids=str)
def test_vmap_over_sharded_axes(registry: Any, kind: AxisType, spec: P) -> None:
    """The mapped axis is folded on the shard, whichever of it and the batch is sharded. One array is not mapped."""
    arrays = arrays_of(CASES["batch"])
    arrays = {name: jnp.stack([array * factor for factor in (1, 2, -1, 0.5)]) for name, array in arrays.items()}
    arrays["value"] = arrays["value"][0]
    function = sharded_vmap(registry, CAUSAL)
    run = lambda a: function(a["query"], a["key"], a["value"])
    expected = jax.jit(partial(pullback, run))(arrays)
    shapes_of_runs(registry)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        sharded = place(arrays, {"query": spec, "key": spec, "value": P(*spec[1:])}, mesh)
        assert collectives(compiled(run, sharded)) == {}
        program = compiled(partial(pullback, run), sharded)
        assert_close(program(sharded), expected)
        counts = collectives(program)
    assert counts.keys() <= {"all-reduce"}
    sizes = {"x": 2, "y": 4}
    mapped, batch, _, heads = (sizes.get(axis, 1) for axis in (*spec, None, None, None, None)[:4])
    shapes = shapes_of_runs(registry)
    assert shapes["flash_attention"]["query"] == (4 // mapped * B // batch, T, 8 // heads, D)


@pytest.mark.parametrize("levels", [2, 3])
def test_the_gradient_of_what_no_outer_vmap_maps(levels: int) -> None:
    """All gradients are sums over the outer axes."""
    registry = Registry(plugins="ejkernel-ops,ejkernel-xla")
    x, weight = jax.random.normal(jax.random.key(0), (2, 3, 2, 4, 16)[-levels - 2 :]), jnp.arange(1.0, 17.0)
    function = partial(registry.call, "rms_norm")
    expected = jax.grad(lambda w: (function(x.reshape(-1, 16), w) ** 3).sum())(weight)
    for _ in range(levels):
        function = jax.vmap(function, (0, None))
    assert_close(jax.grad(lambda w: (function(x, w) ** 3).sum())(weight) / 100, expected / 100)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_two_calls_in_scan_and_remat_and_jit(registry: Any, kind: AxisType) -> None:
    """Two calls in a layer, differentiated in different arrays, in a scan of checkpoints."""

    def layer(x: Any, weights: Any) -> Any:
        normed = registry.call("rms_norm", x, weights["norm"])
        query, key = normed.reshape(B, T, 4, 4), jax.lax.stop_gradient(normed).reshape(B, T, 4, 4)
        attended = registry.call("flash_attention", query * weights["scale"], key, query, causal=True)
        return x + attended.reshape(x.shape), None

    def loss(x: Any, weights: Any) -> Any:
        out, _ = jax.lax.scan(jax.checkpoint(layer), x, weights)
        return (out**2).sum()

    keys = jax.random.split(jax.random.key(2), 2)
    x, weights = (
        jax.random.normal(keys[0], (B, T, 16)),
        {"norm": jax.random.normal(keys[1], (3, 16)), "scale": jnp.arange(1.0, 4.0)},
    )
    expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, weights)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        placed = place({"x": x, **weights}, {"x": P("x")}, mesh)
        x = placed.pop("x")
        assert_close(jax.jit(jax.value_and_grad(loss, (0, 1)))(x, placed), expected)
        assert collectives(compiled(jax.grad(loss), x, placed)).keys() <= {"all-reduce"}


@pytest.mark.parametrize("kinds", [(AxisType.Auto, AxisType.Explicit), KINDS[:1] * 2, KINDS[1:] * 2], ids=str)
@pytest.mark.parametrize("over", [{"x"}, {"x", "y"}], ids=["partly manual", "manual"])
def test_inside_shard_map(registry: Any, kinds: Any, over: set[str]) -> None:
    case = CASES["batch and heads"]
    arrays, function = arrays_of(case), partial(call, registry, case)
    expected = jax.jit(partial(pullback, function))(arrays)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)
    with jax.set_mesh(mesh):
        sharded = place(arrays, case.specs, mesh)
        specs = {name: P("x", None, "y" if "y" in over else None) for name in arrays}
        out_specs = P("x", None, *specs["query"][2:]), P("x", *specs["query"][2:])
        mapped = jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=out_specs, axis_names=over)
        shapes_of_runs(registry)
        assert_close(jax.jit(partial(pullback, mapped))(sharded), expected)
    # On a mesh that is manual and automatic in parts, a custom call is computed whole.
    heads = 8 if over == {"x"} and kinds[1] is AxisType.Auto else 2
    assert shapes_of_runs(registry)["flash_attention"]["query"] == (2, T, heads, D)


def test_the_export_of_a_sharded_program(registry: Any) -> None:
    """With explicit axes. Under automatic ones, what the compiler is to call back cannot be written down."""
    case, mesh = CASES["batch"], mesh_of(AxisType.Explicit)
    arrays, function = arrays_of(case), jax.jit(partial(call, registry, case))
    with jax.set_mesh(mesh):
        sharded = place(arrays, case.specs, mesh)
        exported = jax.export.export(function)(sharded)
        assert_close(jax.export.deserialize(exported.serialize()).call(sharded), function(sharded))


def test_a_program_with_automatic_axes_is_exported_whole(registry: Any) -> None:
    case, mesh = CASES["batch"], mesh_of(AxisType.Auto)
    arrays, function = arrays_of(case), jax.jit(partial(call, registry, case))
    sharded = place(arrays, case.specs, mesh)
    exported = jax.export.export(function)(sharded)
    assert_close(jax.export.deserialize(exported.serialize()).call(sharded), function(sharded))


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_arrays_on_different_meshes_are_named(registry: Any, kind: AxisType) -> None:
    case, others = CASES["batch"], jax.devices()[2:4]
    arrays = place(arrays_of(case), case.specs, mesh_of(kind))
    mesh = jax.sharding.Mesh(others, ("z",), axis_types=(kind,))
    message = (
        r"key is on a mesh of \(z=2\) over the devices \[2, 3\], and query on one of \(x=2, y=4\) over the devices"
    )
    with pytest.raises(ValueError, match=message):
        registry.explain(
            "flash_attention", **arrays | {"key": jax.device_put(arrays["key"], NamedSharding(mesh, P("z")))}
        )
    with pytest.raises(ValueError, match=message):
        call(registry, case, arrays | {"key": jax.device_put(arrays["key"], NamedSharding(mesh, P("z")))})


@pytest.mark.parametrize("kinds", [KINDS[:1] * 2, KINDS[1:] * 2], ids=str)
def test_without_jit(registry: Any, kinds: Any) -> None:
    case = CASES["batch and heads"]
    arrays, function = arrays_of(case), partial(call, registry, case)
    expected = function(arrays)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)
    with jax.set_mesh(mesh), jax.disable_jit():
        assert_close(function(place(arrays, case.specs, mesh)), expected)


def test_a_kernel_that_fails_on_a_shard_raises_its_own_error(registry: Any) -> None:
    class Fault(Exception):
        """A fault of a kernel."""

    @hookimpl
    def heuristic_cfg(inv: Any) -> None:
        if inv["query"].shape[0] != B:
            raise Fault("a fault on a shard")

    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        raise AssertionError

    local = Registry(plugins="")
    local.register(registry.operation("flash_attention"))
    local.register(
        SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend, OPAQUE=("cpu",)), "flash_attention.bad"
    )
    case, mesh = CASES["batch"], mesh_of(AxisType.Auto)
    sharded = place(arrays_of(case), case.specs, mesh)
    with pytest.raises(Exception, match="a fault on a shard") as raised:
        local.call("flash_attention", **sharded)
    assert type(raised.value).__name__ == "NoKernel"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_operation_without_axes(kind: AxisType) -> None:
    """It is not divided, and has the gradients of one device."""

    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        return inv["x"] ** 3

    local, mesh = Registry(plugins=""), mesh_of(kind)
    local.register(Operation(name="cube", signature=lambda x: None))
    local.register(SimpleNamespace(run_backend=run_backend), "cube.reference")
    x = jnp.arange(8.0).reshape(4, 2)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, P("x")))
        total = lambda x: local.call("cube", x).sum()
        for gradient in (jax.grad(total)(sharded), jax.jit(jax.grad(total))(sharded)):
            assert_close(gradient, 3 * x**2)
        assert "cube does not say how it may be sharded" in str(local.explain("cube", sharded))


def test_platforms_of_opaque_code_are_those_of_the_kernel() -> None:
    local = Registry(plugins="ejkernel-ops")

    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> None: ...

    kernel = SimpleNamespace(PLATFORMS={"gpu": 1}, OPAQUE=("cup",), run_backend=run_backend)
    with pytest.raises(PluginError, match="OPAQUE names platforms that PLATFORMS has; got"):
        local.register(kernel, "flash_attention.typo")
