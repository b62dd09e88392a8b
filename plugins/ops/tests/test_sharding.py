"""Attention on several devices: shardings stay, and results and gradients are those of one device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_core import Registry

SPEC = P("batch", None, "heads")


@pytest.fixture(scope="module")
def call() -> Any:
    registry = Registry(plugins="ejkernel-ops")
    return lambda q, k, v: registry.call("flash_attention", q, k, v, causal=True, return_lse=True)


@pytest.fixture(scope="module")
def arrays() -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(3), 3)
    return [jax.random.normal(key, (4, 9, heads, 16)) for key, heads in zip(keys, (4, 2, 2), strict=True)]


def gradients(call: Any) -> Any:
    def loss(*arrays: Any) -> Any:
        out, lse = call(*arrays)
        return (out**2).sum() + (lse * jax.numpy.arange(lse.shape[-1])).sum()

    return jax.grad(loss, argnums=(0, 1, 2))


def close(actual: Any, expected: Any) -> None:
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_vmap_of_sharded_arrays(call: Any, arrays: list[jax.Array], kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(kind, kind))
    batches = [jax.numpy.stack([array, 2 * array]) for array in arrays]
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(array, NamedSharding(mesh, P(None, *SPEC))) for array in batches]
        results = jax.jit(jax.vmap(call))(*sharded)
    for i in range(2):
        close([result[i] for result in results], call(*(array[i] for array in batches)))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_batch_and_heads_sharded(call: Any, arrays: list[jax.Array], kind: AxisType, jit: bool) -> None:
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(kind, kind))
    transform = jax.jit if jit else lambda f: f
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(array, NamedSharding(mesh, SPEC)) for array in arrays]
        out, lse = transform(call)(*sharded)
        grads = transform(gradients(call))(*sharded)
        close((out, lse), call(*arrays))
        if kind is AxisType.Explicit:
            assert jax.typeof(out).sharding.spec == P("batch", None, "heads", None)
            assert jax.typeof(lse).sharding.spec == P("batch", "heads", None)
            assert {str(jax.typeof(gradient).sharding.spec) for gradient in grads} == {
                str(P("batch", None, "heads", None))
            }
        assert {len(array.sharding.device_set) for array in (out, lse, *grads)} == {4}
    close(grads, gradients(call)(*arrays))
