"""Contracted axes (``Axes.summed``) that are sharded: each device has a partial sum, and one all-reduce adds them up."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_core import Axes, Operation, Registry, hookimpl

RNG = np.random.default_rng(5)
KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
A, B, SCALE, BIAS = (RNG.normal(size=shape) for shape in ((6, 16), (16, 8), (8,), (8,)))
#: Each has a scale, which is a factor of every partial sum, and a bias, which is a part of one of them.
AXES = Axes(
    {"a": "m k", "b": "k n", "scale": "n", "bias": "n"},
    {"out": "m n"},
    independent="m n",
    summed="k",
    dtype_option="dtype",
    added="bias",
    nonlinear="squared",
    dtypes={"out": lambda arguments: arguments["dtype"] or arguments["a"].dtype},
)


def compute(arguments: Mapping[str, Any]) -> jax.Array:
    a, b, scale, bias = (arguments[name] for name in ("a", "b", "scale", "bias"))
    wide = jnp.promote_types(a.dtype, jnp.float32)
    out = jnp.einsum("mk,kn->mn", a, b, preferred_element_type=wide, precision="highest") * scale + bias
    return (out**2 if arguments["squared"] else out).astype(arguments["dtype"] or a.dtype)


def kernel(run: Callable[[Any], Any], **fields: Any) -> Any:
    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        return run(inv)

    return SimpleNamespace(run_backend=run_backend, **fields)


def make_registry(axes: Axes = AXES) -> Registry:
    """The operation with a reference, and with a kernel that the compiler cannot partition."""
    registry = Registry(plugins="")
    signature = lambda a, b, scale, bias, *, dtype=None, squared=False: None
    operation = Operation(name="product", signature=signature, axes=axes, backward="product_bwd")
    registry.register(operation)
    registry.register(operation.gradients())
    for name, run in (("product", compute), ("product_bwd", lambda inv: operation.gradients_by_jax(compute, inv))):
        registry.register(kernel(run, PLATFORMS={"cpu": 0}), f"{name}.reference")
        registry.register(kernel(run, PLATFORMS={"cpu": 1}, OPAQUE=("cpu",)), f"{name}.opaque")
    return registry


@pytest.fixture(scope="module")
def registry() -> Registry:
    return make_registry()


def mesh_of(kind: AxisType) -> Any:
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))


def placed(mesh: Any, arrays: Any, *specs: P) -> list[Any]:
    return [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs, strict=True)]


def collectives(text: str) -> dict[str, int]:
    names = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")
    counts = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in names}
    return {name: count for name, count in counts.items() if count}


def gradients(call: Any) -> Any:
    return jax.grad(lambda *arrays: jnp.sin(call(*arrays)).sum(), (0, 1, 2, 3))


def second(call: Any) -> Any:
    """The gradients of a function of all gradients."""
    total = lambda *arrays: sum((jnp.cos(g) * g).sum() for g in gradients(call)(*arrays))
    return jax.grad(total, (0, 1, 2, 3))


def mapped(call: Any) -> Any:
    return lambda *arrays: jax.vmap(call)(*(jnp.stack([x, 2 * x]) for x in arrays))


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "values": lambda call: call,
    "gradients": gradients,
    "gradients, mapped": lambda call: gradients(mapped(call)),
    "tangents": lambda call: lambda *arrays: jax.jvp(call, arrays, tuple(map(jnp.cos, arrays)))[1],
    "second derivatives": second,
}
#: Of each array.
SPECS = {
    "k": (P(None, "y"), P("y"), P(), P()),
    "k of one array": (P(), P("y"), P(), P()),
    "k over both axes": (P(None, ("x", "y")), P(("x", "y")), P(), P()),
    "k and n": (P(None, "y"), P("y", "x"), P("x"), P("x")),
    "k and m": (P("x", "y"), P("y"), P(), P()),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("backend", "kind"), [("opaque", "automatic"), ("opaque", "explicit"), ("reference", "explicit")]
)
def test_values_are_those_of_one_device(registry: Registry, backend: str, kind: str, spec: str, program: str) -> None:
    function = PROGRAMS[program](lambda *arrays: registry.call("product", *arrays, backend=backend))
    mesh = mesh_of(KINDS[kind])
    with jax.enable_x64(True):
        expected = PROGRAMS[program](lambda *a: (a[0] @ a[1]) * a[2] + a[3])(*map(jnp.asarray, (A, B, SCALE, BIAS)))
        with jax.set_mesh(mesh):
            actual = jax.jit(function)(*placed(mesh, (A, B, SCALE, BIAS), *SPECS[spec]))
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-9, atol=1e-9), actual, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_partial_sums_are_float32_and_are_added_up_once(registry: Registry, kind: str) -> None:
    """In bfloat16, a result that is small beside its partial sums would be wrong."""
    a, b = jnp.asarray(A, jnp.bfloat16), jnp.asarray(B, jnp.bfloat16)
    a = jnp.concatenate([100 * a[:, :8], -100 * a[:, :8]], 1) + a
    b = jnp.concatenate([b[:8], b[:8]])
    arrays = (a, b, jnp.ones(8, jnp.bfloat16), jnp.asarray(BIAS, jnp.bfloat16))
    wide = [np.asarray(array, np.float64) for array in arrays]
    mesh = mesh_of(KINDS[kind])
    call = jax.jit(lambda *arrays: registry.call("product", *arrays))
    with jax.set_mesh(mesh):
        sharded = placed(mesh, arrays, *SPECS["k"])
        out, text = call(*sharded), call.lower(*sharded).compile().as_text()
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), wide[0] @ wide[1] + wide[3], rtol=2**-8, atol=1e-4)
    assert collectives(text) == {"all-reduce": 1}
    assert re.search(r"= f32\S* all-reduce", text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_axis_that_another_axis_of_the_array_needs_is_left_to_it(registry: Registry, kind: str) -> None:
    """The result of one product is sharded along its columns, which the next one contracts: as before, that is
    gathered, and not the matrix that is sharded along its own columns.
    """
    mesh = mesh_of(KINDS[kind])
    call = jax.jit(lambda *arrays: registry.call("product", *arrays))
    with jax.set_mesh(mesh):
        arrays = placed(mesh, map(jnp.float32, (A, B, SCALE, BIAS)), P(None, "y"), P(None, "y"), P("y"), P("y"))
        text = call.lower(*arrays).compile().as_text()
        np.testing.assert_allclose(call(*arrays), A @ B * SCALE + BIAS, 1e-5, 1e-5)
    assert re.findall(r"= f32\[([\d,]+)\]\S* all-gather", text) == ["6,16"]
    assert collectives(text) == {"all-gather": 1}


# -- where they are not sums -------------------------------------------------------------------------------------------


def explained(registry: Registry, dtype: Any = "float32", **options: Any) -> str:
    mesh = mesh_of(AxisType.Explicit)
    arrays = placed(mesh, [jnp.asarray(array, dtype) for array in (A, B, SCALE, BIAS)], *SPECS["k"])
    return str(registry.explain("product", *arrays, **options).division)


def gathered(reason: str) -> str:
    return "\n  ".join(
        [
            "on 8 devices: each computes the whole call",
            f"gathered: axis 1 (k) of a, sharded over 'y': {reason}",
            f"gathered: axis 0 (k) of b, sharded over 'y': {reason}",
        ]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_that_is_not_linear_in_the_axis_is_gathered(registry: Registry, kind: str) -> None:
    mesh = mesh_of(KINDS[kind])
    call = lambda *arrays: registry.call("product", *arrays, squared=True)
    with jax.enable_x64(True):
        expected = [f(plain_squares)(A, B, SCALE, BIAS) for f in (lambda f: f, gradients)]
        with jax.set_mesh(mesh):
            arrays = placed(mesh, (A, B, SCALE, BIAS), *SPECS["k"])
            actual = [jax.jit(f(call))(*arrays) for f in (lambda f: f, gradients)]
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-9, atol=1e-9), actual, expected)


def plain_squares(a: Any, b: Any, scale: Any, bias: Any) -> Any:
    return (jnp.asarray(a) @ b * scale + bias) ** 2


def test_explanations_say_what_is_added_up_and_why_something_is_gathered(registry: Registry) -> None:
    assert explained(registry) == "on 8 devices: each computes its shard, k over 'y'; out is added up over 'y'"
    assert explained(registry, squared=True) == gathered("the result is not linear in it with squared=True")
    narrow = make_registry(attrs.evolve(AXES, dtype_option=None))
    assert explained(narrow) == explained(registry)
    assert explained(narrow, "bfloat16") == gathered("partial sums would have fewer bits than float32")
    packed = make_registry(attrs.evolve(AXES, arrays={**AXES.arrays, "bias": "k/16 n"}, added=()))
    mesh = mesh_of(AxisType.Explicit)
    arrays = placed(mesh, (A, B, SCALE, BIAS[None]), *SPECS["k"])
    assert str(packed.explain("product", *arrays).division) == gathered("bias has k/16, which its shards do not divide")


def test_names_of_partial_sums_are_checked(registry: Registry) -> None:
    arrays = {
        name: jnp.asarray(array, jnp.bfloat16) for name, array in zip(AXES.arrays, (A, B, SCALE, BIAS), strict=True)
    }
    out = arrays["a"] @ arrays["b"]
    fields = {**arrays, "out": out, "d_out": out, "wrt": ("b", "a")}
    call = lambda names: registry.call("product_bwd", **fields, partial_sums=names)
    assert [str(gradient.dtype) for gradient in call(("a",))] == ["bfloat16", "float32"]
    for names in ("a", ("scale",)):
        with pytest.raises(ValueError, match="partial_sums: takes a tuple of names in wrt; got"):
            call(names)


def test_a_plan_is_that_of_the_partial_sum_and_its_gradients_are_those_of_the_call(registry: Registry) -> None:
    arrays = placed(mesh_of(AxisType.Explicit), (A, B, SCALE, BIAS), *SPECS["k"])
    arrays = [array.astype(jnp.bfloat16) for array in arrays]
    on_shard = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((6, 4), (4, 8), (8,), (8,))]
    plan = registry.plan("product", *arrays)
    assert plan.invocation.key == registry.invocation("product", *on_shard, dtype=jnp.dtype("float32")).key
    backward = registry.explain("product", *arrays).backward.plan.invocation
    assert [str(backward[name].dtype) for name in ("out", "d_out")] == ["bfloat16"] * 2
    assert backward["dtype"] is None
    assert backward["partial_sums"] == ("scale",)  # a sum over k as well, unlike that of the bias
    arrays = placed(mesh_of(AxisType.Explicit), arrays, P(), P(None, "y"), P("y"), P("y"))
    backward = registry.explain("product", *arrays).backward.plan.invocation
    assert backward["partial_sums"] == ("a",)
