"""References on explicit mesh axes, under transformations: values of arrays on one device.

The reference here is plain JAX that refuses sharded arrays: it sorts rows, and loops from zeros. It need not know of
meshes, because it runs on the shard of each device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_core import Axes, Operation, Registry, hookimpl

RNG = np.random.default_rng(11)
#: Two elements of a mapped axis. Two devices can share every axis.
X = RNG.normal(size=(2, 4, 6, 8))
W = RNG.normal(size=8)
AXES = Axes(
    {"x": "groups rows dim", "w": "dim"},
    {"out": "groups rows dim", "norm": "groups rows"},
    independent="groups",
    whole="rows dim",
    vmap="groups",
)


def compute(a: Mapping[str, Any]) -> Any:
    """Sums over the rows before each row, of rows in another order; and the norm of each row."""
    x, w = a["x"], a["w"]
    order = jnp.argsort(x[..., 0], axis=1)
    rows = jnp.take_along_axis(x, order[..., None], axis=1).swapaxes(0, 1)
    _, sums = jax.lax.scan(
        lambda total, row: (total / 2 + jnp.tanh(row), total * w + row), jnp.zeros_like(rows[0]), rows
    )
    norm = jnp.sqrt((x.reshape(-1, x.shape[-1]) ** 2).sum(-1)).reshape(x.shape[:-1])
    return sums.swapaxes(0, 1), norm


def kernel(run: Callable[[Any], Any]) -> SimpleNamespace:
    @hookimpl
    def run_backend(inv: Any, cfg: Any) -> Any:
        return run(inv)

    return SimpleNamespace(run_backend=run_backend, PLATFORMS={"cpu": 0})


def make_registry(has_axes: bool) -> Registry:
    registry = Registry(plugins="")
    backward = "sums_bwd" if has_axes else None
    operation = Operation(
        name="sums",
        signature=lambda x, w: None,
        axes=AXES if has_axes else None,
        results=("out", "norm"),
        backward=backward,
    )
    registry.register(operation)
    registry.register(kernel(compute), "sums.reference")
    if has_axes:
        registry.register(operation.gradients())
        registry.register(kernel(lambda inv: operation.gradients_by_jax(compute, inv)), "sums_bwd.reference")
    return registry


def loss(function: Any) -> Any:
    def total(x: Any, w: Any) -> Any:
        out, norm = function(x, w)
        return (out**2).sum() + jnp.sin(norm).sum()

    return total


def along(function: Any) -> Any:
    """The derivative along a direction, in reverse mode."""
    return lambda x, w: sum((jnp.cos(g) * g).sum() for g in jax.grad(function, (0, 1))(x, w))


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "values": lambda f: f,
    "gradients": lambda f: jax.grad(loss(f), (0, 1)),
    "second derivatives": lambda f: jax.grad(along(loss(f)), (0, 1)),
    "third derivatives": lambda f: jax.grad(along(along(loss(f))), (0, 1)),
    "tangents": lambda f: lambda x, w: jax.jvp(f, (x, w), (jnp.cos(x), w)),
    "forward of reverse": lambda f: lambda x, w: jax.jvp(jax.grad(loss(f), (0, 1)), (x, w), (jnp.cos(x), w))[1],
    "reverse of forward": lambda f: jax.grad(lambda x, w: jax.jvp(loss(f), (x, w), (jnp.cos(x), w))[1], (0, 1)),
    "checkpoint": lambda f: jax.grad(along(jax.checkpoint(loss(f))), (0, 1)),
    "transposed twice": lambda f: lambda x, w: twice_transposed(lambda x: jax.jvp(f, (x, w), (x, w))[1][0], x),
}


def twice_transposed(function: Any, x: Any) -> Any:
    """A linear function, from the transpose of its transpose."""
    tangents = jax.linearize(function, x)[1]
    transposed = lambda out: jax.linear_transpose(tangents, x)(out)[0]
    return jax.linear_transpose(transposed, tangents(x))(x)[0]


#: How the call is mapped over the first axis of ``x``, which is not among those that a single call has.
MAPPED: dict[str, Callable[[Any, Any], Any]] = {
    "not": lambda program, f: lambda x, w: program(f)(x[0], w),
    "outside": lambda program, f: lambda x, w: jax.vmap(lambda x: program(f)(x, w))(x),
    "inside": lambda program, f: program(lambda x, w: jax.vmap(lambda x: f(x, w))(x)),
    "scan": lambda program, f: lambda x, w: jax.lax.scan(lambda carry, x: (carry, program(f)(x, w)), 0.0, x)[1],
}
#: Shardings of ``x`` and of ``w``: of each axis.
SPECS = {
    "independent": (P(None, "a"), P("b")),
    "whole": (P(None, None, "a"), P("b")),
    "both": (P(None, "a", None, "b"), P()),
    "mapped": (P("a", "b"), P("b")),
    "mapped and whole": (P("b", None, ("a",)), P("a")),
}
CASES = [
    (program, mapped, spec)
    for program in PROGRAMS
    for mapped in MAPPED
    for spec in SPECS
    if not ("mapped" in spec and mapped in ("not", "scan"))  # JAX cannot take a part of, or loop over, a sharded axis
]


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-9, atol=1e-9), actual, expected)


@pytest.fixture(scope="module")
def expected() -> Callable[[str, str], Any]:
    """The values of the reference on one device, as a function of a program and how it is mapped."""
    known: dict[Any, Any] = {}

    def values(program: str, mapped: str) -> Any:
        if (program, mapped) not in known:
            function = MAPPED[mapped](PROGRAMS[program], lambda x, w: compute({"x": x, "w": w}))
            with jax.enable_x64(True):
                known[program, mapped] = jax.jit(function)(X, W)
        return known[program, mapped]

    return values


@pytest.mark.parametrize(("program", "mapped", "spec"), CASES)
@pytest.mark.parametrize("has_axes", [True, False])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_a_reference_need_not_know_of_meshes(
    expected: Any, backend: str | None, has_axes: bool, program: str, mapped: str, spec: str
) -> None:
    registry = make_registry(has_axes)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    function = MAPPED[mapped](PROGRAMS[program], lambda x, w: registry.call("sums", x, w, backend=backend))
    with jax.enable_x64(True), jax.set_mesh(mesh):
        x, w = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((X, W), SPECS[spec], strict=True))
        assert_close(jax.jit(function)(x, w), expected(program, mapped))
