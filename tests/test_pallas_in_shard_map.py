"""Values and gradients of a plain ``pallas_call`` kernel inside ``shard_map``."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel_core import Operation, Registry, gradient_signature, hookimpl

RNG = np.random.default_rng(3)
X = jnp.asarray(RNG.normal(size=(16, 4)), jnp.float32)
WEIGHT = jnp.asarray(RNG.normal(size=(1, 4)), jnp.float32)


@attrs.frozen
class Config:
    """A configuration without fields."""


def scale(x: Any, weight: Any) -> Any:
    """The operation: every row of x times the weight."""


def outputs(names: Callable[[Any], tuple[str, ...]]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda a: tuple(jax.ShapeDtypeStruct(a[name].shape, a[name].dtype) for name in names(a))


FORWARD = Operation(
    name="scale", signature=scale, backward="scale_bwd", results=("out",), outputs=outputs(lambda a: ("x",))
)
BACKWARD = Operation(
    name="scale_bwd",
    signature=gradient_signature(FORWARD.signature, FORWARD.results),
    arrays=("x", "weight", "out", "d_out"),
    outputs=outputs(lambda a: a["wrt"]),
)


def multiply(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] * y_ref[...]


def sum_of_products(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
    out_ref[...] = (x_ref[...] * y_ref[...]).sum(0, keepdims=True)


def run(body: Any, shape: tuple[int, ...], *arrays: Any) -> Any:
    return pl.pallas_call(body, jax.ShapeDtypeStruct(shape, jnp.float32), interpret=True)(*arrays)


def forward(inv: Any) -> tuple[Any, ...]:
    return (run(multiply, inv["x"].shape, inv["x"], inv["weight"]),)


def backward(inv: Any) -> tuple[Any, ...]:
    gradients = {
        "x": lambda: run(multiply, inv["x"].shape, inv["d_out"], inv["weight"]),
        "weight": lambda: run(sum_of_products, inv["weight"].shape, inv["d_out"], inv["x"]),
    }
    return tuple(gradients[name]() for name in inv["wrt"])


def kernel(compute: Callable[[Any], tuple[Any, ...]]) -> Any:
    @hookimpl
    def heuristic_cfg(inv: Any) -> Config:
        return Config()

    @hookimpl
    def run_backend(inv: Any, cfg: Config) -> tuple[Any, ...]:
        return compute(inv)

    return SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend, Config=Config)


@pytest.fixture(scope="module")
def registry() -> Registry:
    registry = Registry()
    registry.register(FORWARD, "scale")
    registry.register(BACKWARD, "scale_bwd")
    registry.register(kernel(forward), "scale.plain_pallas")
    registry.register(kernel(backward), "scale_bwd.plain_pallas")
    return registry


@pytest.mark.parametrize("is_jitted", [True, False])
@pytest.mark.parametrize("check_vma", [True, False])
def test_values_and_gradients(registry: Registry, check_vma: bool, is_jitted: bool) -> None:
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    call = jax.shard_map(
        lambda x, weight: registry.call("scale", x, weight),
        mesh=mesh,
        in_specs=(P("rows"), P()),
        out_specs=P("rows"),
        check_vma=check_vma,
    )
    value, vjp = jax.vjp(jax.jit(call) if is_jitted else call, X, WEIGHT)
    d_x, d_weight = vjp(jnp.cos(X))
    assert jnp.allclose(value, X * WEIGHT, atol=1e-6)
    assert jnp.allclose(d_x, jnp.cos(X) * WEIGHT, atol=1e-6)
    assert jnp.allclose(d_weight, (jnp.cos(X) * X).sum(0, keepdims=True), atol=1e-5)


def test_gradients_inside_shard_map(registry: Registry) -> None:
    """The gradient of a replicated array is summed over the devices."""

    def gradients(x: Any, weight: Any) -> Any:
        _, vjp = jax.vjp(lambda x, weight: registry.call("scale", x, weight), x, weight)
        return vjp(jnp.cos(x))

    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(gradients, mesh=mesh, in_specs=(P("rows"), P()), out_specs=(P("rows"), P()))
    d_x, d_weight = jax.jit(sharded)(X, WEIGHT)
    assert jnp.allclose(d_x, jnp.cos(X) * WEIGHT, atol=1e-6)
    assert jnp.allclose(d_weight, (jnp.cos(X) * X).sum(0, keepdims=True), atol=1e-5)
