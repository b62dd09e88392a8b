"""Row-parallel products of groups: k is sharded, so each device has a partial sum. Against NumPy in float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_core
import ejkernel_xla.grouped_matmul
import ejkernel_xla.grouped_matmul.backward
import ejkernel_xla.moe_permute_matmul
from ejkernel_core import Registry

RNG = np.random.default_rng(48)
SIZES = np.array([9, 0, 16, 12], np.int32)
ROWS, K, N, GROUPS = 40, 64, 16, len(SIZES)
#: In bfloat16, so that NumPy in float64 has the same numbers.
LHS, RHS, BIAS, D_OUT = (
    RNG.standard_normal(shape).astype(jnp.bfloat16) for shape in ((ROWS, K), (GROUPS, K, N), (GROUPS, N), (ROWS, N))
)
#: Halves of k that almost cancel: what bfloat16 loses of partial sums is large beside their sum.
CANCELLING = np.concatenate([LHS[:, : K // 2], -LHS[:, : K // 2]], 1), np.concatenate([RHS[:, : K // 2]] * 2, 1)
KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call() -> Call:
    """Calls of kernels in plain JAX, which the compiler may not partition: the core divides them, as those on GPUs."""
    registry = Registry(plugins="ejkernel-ops,ejkernel-xla")
    for name, kernel in (
        ("grouped_matmul", ejkernel_xla.grouped_matmul),
        ("grouped_matmul_bwd", ejkernel_xla.grouped_matmul.backward.backward),
        ("moe_permute_matmul", ejkernel_xla.moe_permute_matmul.forward),
        ("moe_permute_matmul_bwd", ejkernel_xla.moe_permute_matmul.backward),
    ):
        fields = {
            name: getattr(kernel, name) for name in ("heuristic_cfg", "run_backend", "Config") if hasattr(kernel, name)
        }
        registry.register(SimpleNamespace(**fields, OPAQUE=("cpu",), PLATFORMS={"cpu": 90}), f"{name}.opaque")
    return registry.call


def mesh_of(kind: str, *shape: int) -> Any:
    return jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=(KINDS[kind],) * len(shape))


def placed(mesh: Any, array: Any, *spec: Any) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def collectives(text: str) -> dict[str, int]:
    names = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")
    counts = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in names}
    return {name: count for name, count in counts.items() if count}


def product(lhs: Any, rhs: Any, bias: Any = None, first: int = 0) -> np.ndarray:
    """The products of the groups from ``first`` on."""
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    out, ends = np.zeros((len(lhs), rhs.shape[2])), np.cumsum(SIZES)
    for group, matrix in enumerate(rhs, first):
        rows = slice(ends[group] - SIZES[group], ends[group])
        out[rows] = lhs[rows] @ matrix + (0 if bias is None else np.asarray(bias[group - first], np.float64))
    return out


def products_of_gradients(lhs: Any, rhs: Any, d_out: Any) -> list[np.ndarray]:
    """The gradients of ``lhs``, of ``rhs`` and of a bias."""
    lhs, rhs, d_out = (np.asarray(array, np.float64) for array in (lhs, rhs, d_out))
    d_lhs, d_rhs, d_bias = np.zeros_like(lhs), np.zeros_like(rhs), np.zeros((len(rhs), rhs.shape[2]))
    for group, (size, end) in enumerate(zip(SIZES, np.cumsum(SIZES), strict=True)):
        rows = slice(end - size, end)
        d_lhs[rows], d_rhs[group] = d_out[rows] @ rhs[group].T, lhs[rows].T @ d_out[rows]
        d_bias[group] = d_out[rows].sum(0)
    return [d_lhs, d_rhs, d_bias]


def assert_rounded_once(actual: Any, expected: np.ndarray) -> None:
    """The exact numbers, rounded to bfloat16: by at most half of the last place."""
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=1.01 * 2**-8, atol=1e-5)


#: The shapes of meshes, and how lhs, rhs and the bias are sharded.
SPECS: dict[str, tuple[tuple[int, ...], tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]] = {
    "k": ((8,), (None, "x"), (None, "x"), ()),
    "k of the matrices": ((8,), (), (None, "x"), ()),
    "k over both axes": ((2, 4), (None, ("x", "y")), (None, ("x", "y")), ()),
    "k and n": ((4, 2), (None, "x"), (None, "x", "y"), (None, "y")),
    "k and experts": ((4, 2), (None, "x"), ("y", "x"), ("y",)),
    "k and rows": ((4, 2), ("y", "x"), (None, "x"), ()),
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(call: Call, kind: str, spec: str) -> None:
    shape, *specs = SPECS[spec]
    mesh = mesh_of(kind, *shape)
    arrays = [placed(mesh, array, *own) for array, own in zip((*CANCELLING, BIAS), specs, strict=True)]

    def results(lhs: Any, rhs: Any, bias: Any) -> Any:
        out, vjp = jax.vjp(lambda *a: call("grouped_matmul", a[0], a[1], SIZES, rhs_bias=a[2]), lhs, rhs, bias)
        return out, vjp(jnp.asarray(D_OUT))

    with jax.set_mesh(mesh):
        out, gradients = jax.jit(results)(*arrays)
    assert_rounded_once(out, product(*CANCELLING, BIAS))
    for gradient, expected in zip(gradients, products_of_gradients(*CANCELLING, D_OUT), strict=True):
        assert_rounded_once(gradient, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_transposed_mapped_and_a_part_of_the_groups(call: Call, kind: str) -> None:
    mesh = mesh_of(kind, 8)
    lhs = placed(mesh, np.stack([LHS, 2 * LHS]), None, None, "x")
    rhs = placed(mesh, RHS[1:3].swapaxes(1, 2), None, None, "x")
    bias = placed(mesh, BIAS[1:3])

    def one(lhs: Any, rhs: Any, bias: Any) -> Any:
        options = {"transpose_rhs": True, "rhs_bias": bias, "group_offset": 1}
        return call("grouped_matmul", lhs, rhs, SIZES, **options)

    mapped = jax.vmap(one, (0, None, None))
    with jax.set_mesh(mesh):
        out = jax.jit(mapped)(lhs, rhs, bias)
        d_bias = jax.jit(jax.grad(lambda bias: (mapped(lhs, rhs, bias) * D_OUT).astype(jnp.float32).sum()))(bias)
    for own, factor in zip(out, (1, 2), strict=True):
        assert_rounded_once(own, product(factor * LHS, RHS[1:3], BIAS[1:3], first=1))
    expected = 2 * products_of_gradients(LHS, RHS, D_OUT)[2][1:3]
    np.testing.assert_allclose(np.asarray(d_bias, np.float64), expected, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_arrays_that_all_devices_share_are_rounded_once(call: Call, kind: str) -> None:
    """They are sums over a mapped axis that is sharded, beside k."""
    mesh = mesh_of(kind, 4, 2)
    factors = np.array([100, 1, -100, 2]).astype(jnp.bfloat16)  # the first and the third element almost cancel
    lhs = placed(mesh, factors[:, None, None] * LHS, "x", None, "y")
    rhs, bias = placed(mesh, RHS, None, "y"), placed(mesh, BIAS)

    def gradients(lhs: Any, rhs: Any, bias: Any) -> Any:
        one = lambda lhs, rhs, bias: call("grouped_matmul", lhs, rhs, SIZES, rhs_bias=bias)
        out, vjp = jax.vjp(lambda *shared: jax.vmap(one, (0, None, None))(lhs, *shared), rhs, bias)
        return vjp(jnp.zeros_like(out) + jnp.asarray(D_OUT))

    with jax.set_mesh(mesh):
        d_rhs, d_bias = jax.jit(gradients)(lhs, rhs, bias)
    _, expected_d_rhs, expected_d_bias = products_of_gradients(LHS, RHS, D_OUT)
    assert_rounded_once(d_rhs, 3 * expected_d_rhs)
    assert_rounded_once(d_bias, 4 * expected_d_bias)


@pytest.mark.parametrize("kind", KINDS)
def test_each_device_of_parallel_experts_may_have_shards_of_them(call: Call, kind: str) -> None:
    """``shard_map`` over the experts, and k sharded over the other axis of the mesh."""
    mesh = jax.make_mesh((2, 4), ("e", "x"), axis_types=(KINDS[kind],) * 2)

    def parallel(lhs: Any, rhs: Any) -> Any:
        first = jax.lax.axis_index("e") * rhs.shape[0]
        options = {"group_offset": first, "preferred_element_type": jnp.float32}
        return jax.lax.psum(call("grouped_matmul", lhs, rhs, SIZES, **options), "e")

    specs = {"in_specs": (P(), P("e")), "out_specs": P(), "axis_names": {"e"}}
    with jax.set_mesh(mesh):
        run = jax.jit(jax.shard_map(parallel, mesh=mesh, **specs))
        out = run(placed(mesh, LHS, None, "x"), placed(mesh, RHS, "e", "x"))
    np.testing.assert_allclose(out, product(LHS, RHS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_inside_shard_map_a_call_is_that_of_the_shard(call: Call, kind: str) -> None:
    mesh = mesh_of(kind, 8)
    own = lambda lhs, rhs: call("grouped_matmul", lhs, rhs, SIZES)[None]
    specs = {"in_specs": (P(None, "x"), P(None, "x")), "out_specs": P("x")}
    parts = jax.jit(jax.shard_map(own, mesh=mesh, **specs))(placed(mesh, LHS, None, "x"), placed(mesh, RHS, None, "x"))
    for part, lhs, rhs in zip(parts, np.split(LHS, 8, 1), np.split(RHS, 8, 1), strict=True):
        assert_rounded_once(part, product(lhs, rhs))


@pytest.mark.parametrize("columns", [None, "y"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_in_place(call: Call, kind: str, columns: str | None) -> None:
    """``moe_permute_matmul`` contracts the tokens."""
    mesh = mesh_of(kind, 4, 2)
    order = RNG.permutation(ROWS).astype(np.int32)
    tokens, rhs = CANCELLING[0][: ROWS // 2], CANCELLING[1]
    specs = ((None, "x"), (None, "x", columns), (None, columns))
    arrays = [placed(mesh, array, *spec) for array, spec in zip((tokens, rhs, BIAS), specs, strict=True)]

    def results(x: Any, rhs: Any, bias: Any) -> Any:
        run = lambda x, rhs, bias: call("moe_permute_matmul", x, order, rhs, SIZES, 2, rhs_bias=bias)
        out, vjp = jax.vjp(run, x, rhs, bias)
        return out, vjp(jnp.asarray(D_OUT))

    with jax.set_mesh(mesh):
        out, (d_x, *others) = jax.jit(results)(*arrays)
        text = jax.jit(results).lower(*arrays).compile().as_text()
    rows = tokens[order // 2]
    assert_rounded_once(out, product(rows, rhs, BIAS))
    d_rows, *expected = products_of_gradients(rows, rhs, D_OUT)
    for gradient, wanted in zip(others, expected, strict=True):
        assert_rounded_once(gradient, wanted)
    d_tokens = np.zeros(tokens.shape)
    np.add.at(d_tokens, order // 2, d_rows)
    if columns is None:  # the gradients of both rows of a token are rounded
        np.testing.assert_allclose(np.asarray(d_x, np.float64), d_tokens, rtol=2**-7, atol=6e-2)
        assert collectives(text) == {"all-reduce": 1}
    else:
        assert_rounded_once(d_x, d_tokens)


def test_an_activation_is_applied_to_the_whole_sum(call: Call) -> None:
    mesh = mesh_of("explicit", 8)
    lhs, rhs, bias = placed(mesh, LHS / 8, None, "x"), placed(mesh, RHS, None, "x"), placed(mesh, BIAS)
    hidden = product(LHS / 8, RHS, BIAS)
    gate, up = np.split(hidden, 2, 1)
    run = lambda lhs, rhs, bias: call("grouped_matmul", lhs, rhs, SIZES, rhs_bias=bias, activation="silu_gated")
    with jax.set_mesh(mesh):
        out = jax.jit(run)(lhs, rhs, bias)
    assert_rounded_once(out, gate / (1 + np.exp(-gate)) * up)
    division = str(ejkernel_core.explain("grouped_matmul", lhs, rhs, SIZES, activation="silu_gated").division)
    reason = "sharded over 'x': the result is not linear in it with activation='silu_gated'"
    assert division.splitlines()[1:] == [
        f"  gathered: axis 1 (k) of lhs, {reason}",
        f"  gathered: axis 1 (k) of rhs, {reason}",
    ]


# -- what travels, and the memory of a device --------------------------------------------------------------------------


def row_parallel(call: Call, mesh: Any, is_gathered: bool) -> Call:
    """The product of arrays whose k is sharded; or as it would be if every device needed k whole."""

    def whole(array: Any) -> Any:
        return jax.sharding.reshard(array, P()) if "Explicit" in str(mesh.axis_types) else _constrained(mesh, array)

    def run(lhs: Any, rhs: Any) -> Any:
        arrays = (whole(lhs), whole(rhs)) if is_gathered else (lhs, rhs)
        return call("grouped_matmul", *arrays, jnp.full(8, 32, jnp.int32))

    return run


def _constrained(mesh: Any, array: Any) -> Any:
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P()))


def gradients_of(function: Call) -> Call:
    return jax.grad(lambda *arrays: (function(*arrays).astype(jnp.float32) ** 2).sum(), (0, 1))


def compiled(function: Call, mesh: Any) -> Any:
    shapes = [((256, 1024), P(None, "x")), ((8, 1024, 512), P(None, "x"))]
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, spec)) for shape, spec in shapes]
    with jax.set_mesh(mesh):
        return jax.jit(function).lower(*arrays).compile()


@pytest.mark.parametrize("kind", KINDS)
def test_one_all_reduce_and_no_gather_of_the_matrices(call: Call, kind: str) -> None:
    mesh = mesh_of(kind, 8)
    for program in (lambda function: function, gradients_of):
        run, gathered = (compiled(program(row_parallel(call, mesh, of)), mesh) for of in (False, True))
        assert collectives(run.as_text()) == {"all-reduce": 1}
        assert re.search(r"= f32\[256,512\]\S* all-reduce", run.as_text())
        memory, of_gathered = run.memory_analysis(), gathered.memory_analysis()
        assert memory.argument_size_in_bytes == of_gathered.argument_size_in_bytes
        # All matrices have 8 MiB, and a shard of them 1 MiB.
        assert of_gathered.temp_size_in_bytes > 8 << 20 > 2 * memory.temp_size_in_bytes


def test_the_compiler_gathers_no_matrices_either() -> None:
    """It partitions a kernel in plain JAX by itself, where the axes of the mesh are automatic."""
    mesh = mesh_of("automatic", 8)
    for program in (lambda function: function, gradients_of):
        text = compiled(program(row_parallel(ejkernel_core.call, mesh, False)), mesh).as_text()
        assert collectives(text) == {"all-reduce": 1}


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_a_kernel_are_explained_inside_of_a_mesh(kind: str) -> None:
    mesh = jax.make_mesh((8,), ("inner",), axis_types=(KINDS[kind],), devices=jax.devices()[:8])
    shapes = ((16, 8), jnp.float32), ((2, 8, 4), jnp.float32), ((2,), jnp.int32)
    arrays = [jax.device_put(jnp.ones(*shape), NamedSharding(mesh, P())) for shape in shapes]
    outside = ejkernel_core.explain("grouped_matmul", *arrays).backward
    with jax.set_mesh(mesh):
        inside = ejkernel_core.explain("grouped_matmul", *arrays).backward
    assert outside is not None
    assert inside is not None
    assert [part.op for part in inside.parts] == [part.op for part in outside.parts]
    assert len(inside.parts) == 2
