"""The reference on meshes with explicit axes, where shardings are part of types: values against one device."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel_core import Registry

HEADS = 4
SPECS = {"batch": P("x"), "length": P(None, "x"), "heads": P(None, None, "x")}
BIASES = {"whole": (2, HEADS, 6, 6), "of-heads": (1, HEADS, 1, 6), "of-rows": (2, 1, 6, 6), "none": None}


@pytest.fixture(scope="module")
def call() -> Any:
    registry = Registry(plugins="ejkernel-ops")
    return lambda arrays: registry.call("flash_attention", **arrays, causal=True, return_lse=True, backend="reference")


def inputs(kv_heads: int, bias: str) -> dict[str, jax.Array]:
    shapes = {
        "query": (2, 6, HEADS, 8),
        "key": (2, 6, kv_heads, 8),
        "value": (2, 6, kv_heads, 5),
        "softmax_aux": (HEADS, 2),
        "bias": BIASES[bias],
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    named_shapes = zip(keys, shapes.items(), strict=True)
    return {name: jax.random.normal(key, shape) for key, (name, shape) in named_shapes if shape is not None}


def loss(call: Any) -> Any:
    def total(arrays: Any) -> Any:
        out, lse = call(arrays)
        return (out**2).sum() + (lse * jnp.arange(lse.shape[-1], dtype=lse.dtype)[None, None]).sum()

    return total


def shard(array: jax.Array, name: str, where: str, mesh: Any) -> jax.Array:
    """Sharded along the axis of that name, if it has one that two devices can share."""
    axes = {"bias": {"batch": 0, "heads": 1, "length": 2}, "softmax_aux": {"heads": 0}}
    axis = axes.get(name, {"batch": 0, "length": 1, "heads": 2}).get(where)
    spec = P() if axis is None or array.shape[axis] % 2 else P(*(None,) * axis, "x")
    return jax.device_put(array, NamedSharding(mesh, spec))


def close(result: Any, expected: Any) -> None:
    jax.tree.map(lambda r, e: np.testing.assert_allclose(r, e, rtol=1e-5, atol=1e-5), result, expected)


#: Quick for one number of heads for each sharding and bias. The long sweep has all.
PLACES, KV_HEADS = ("batch", "length", "heads"), (4, 2, 1)
COMBINATIONS = [
    pytest.param(kv_heads, where, bias, marks=() if (h + w + b) % 3 == 0 else pytest.mark.long)
    for (h, kv_heads), (w, where), (b, bias) in itertools.product(*map(enumerate, (KV_HEADS, PLACES, BIASES)))
]


@pytest.mark.parametrize(("kv_heads", "where", "bias"), COMBINATIONS)
def test_values_and_gradients(call: Any, kv_heads: int, where: str, bias: str) -> None:
    arrays = inputs(kv_heads, bias)
    expected = call(arrays), jax.jit(jax.grad(loss(call)))(arrays)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharded = {name: shard(array, name, where, mesh) for name, array in arrays.items()}
        for transform in (lambda f: f, jax.jit):
            results, gradients = transform(call)(sharded), transform(jax.grad(loss(call)))(sharded)
            close((results, gradients), expected)
            # Under a mask, each device needs all queries, as with any other kernel.
            spec = (*(P() if where == "length" else SPECS[where]), *(None,) * 4)
            assert jax.typeof(results[0]).sharding.spec == P(*spec[:4])
            assert jax.typeof(results[1]).sharding.spec == P(spec[0], spec[2], spec[1])
            shardings = {name: jax.typeof(array).sharding for name, array in sharded.items()}
            assert {name: jax.typeof(gradient).sharding for name, gradient in gradients.items()} == shardings


@pytest.mark.long
def test_second_derivatives_and_forward_mode(call: Any) -> None:
    arrays = inputs(2, "of-heads")

    def hessian(arrays: Any) -> Any:
        return jax.hessian(lambda query: loss(call)(arrays | {"query": query}))(arrays["query"])

    expected = hessian(arrays)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        result = hessian({name: shard(array, name, "heads", mesh) for name, array in arrays.items()})
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_sharded_arrays_without_set_mesh(call: Any) -> None:
    arrays = inputs(2, "none")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    sharded = {name: shard(array, name, "heads", mesh) for name, array in arrays.items()}
    gradient = jax.jit(jax.grad(loss(call)))
    close(gradient(sharded), gradient(arrays))


@pytest.mark.parametrize("over", ["a", "b"])
def test_shard_map_over_some_axes_of_a_mesh(call: Any, over: str) -> None:
    arrays = {name: array for name, array in inputs(2, "none").items() if name != "softmax_aux"}
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    gradient = jax.grad(loss(call))
    results, gradients = call(arrays), jax.jit(gradient)(arrays)
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(array, NamedSharding(mesh, P(over))) for name, array in arrays.items()}
        mapped = partial(jax.shard_map, mesh=mesh, in_specs=P(over), out_specs=P(over), axis_names={over})
        close(mapped(call)(placed), results)
        close(jax.jit(mapped(call))(placed), results)
        close(jax.jit(mapped(gradient))(placed), gradients)
