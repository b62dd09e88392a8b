"""``jax.vmap`` over an axis that is sharded over explicit mesh axes has the values of a loop on one device."""

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

import ejkernel_core

#: Shardings of the mapped axis: alone, with heads over another mesh axis, over two mesh axes, or with the batch.
SPECS = {"alone": P("x"), "beside-heads": P("x", None, None, "y"), "over-two": P(("x", "y")), "of-batch": P("x", "y")}
#: With dropout a call loops. Without it, a call folds the mapped axis into the batch, or loops for sinks' gradient.
OPTIONS: dict[str, dict[str, Any]] = {
    "folded": {},
    "looped": {"dropout_prob": 0.3, "dropout_seed": 5},
}


@pytest.fixture(scope="module")
def arrays() -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(3), 3)
    return [jax.random.normal(key, (4, 2, 6, heads, 8)) for key, heads in zip(keys, (4, 2, 2), strict=True)]


def loss(backend: str, options: dict[str, Any]) -> Any:
    def total(query: Any, key: Any, value: Any, sinks: Any) -> Any:
        out, lse = ejkernel_core.call(
            "flash_attention", query, key, value, softmax_aux=sinks, return_lse=True, backend=backend, **options
        )
        return (out**2).sum() + lse.sum()

    return total


def loop(function: Any, arrays: Any, sinks: Any) -> Any:
    rows = [function(*(array[i] for array in arrays), sinks) for i in range(len(arrays[0]))]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), actual, expected)


#: Each spec, backend and set of options is tried quickly in some combination.
QUICK = {("xla", "alone", "folded"), ("xla", "over-two", "looped"), ("reference", "beside-heads", "looped")}
QUICK |= {("reference", "of-batch", "folded")}


@pytest.mark.parametrize(
    ("backend", "spec", "options"),
    [
        pytest.param(*names, marks=() if names in QUICK else pytest.mark.long)
        for names in itertools.product(("reference", "xla"), SPECS, OPTIONS)
    ],
)
def test_values_and_gradients(arrays: list[jax.Array], backend: str, spec: str, options: str) -> None:
    sinks = jnp.arange(4.0)
    total = loss(backend, OPTIONS[options])
    wrt = (0, 1, 2, 3) if options == "looped" else (0, 1, 2)
    mapped, axes = jax.vmap(total, (0, 0, 0, None)), (0, 0, 0, None)
    values, gradients = loop(total, arrays, sinks), loop(jax.grad(total, wrt), arrays, sinks)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(array, NamedSharding(mesh, SPECS[spec])) for array in arrays]
        shared = jax.device_put(sinks, NamedSharding(mesh, P()))
        for transform in (lambda f: f, jax.jit):
            actual = transform(mapped)(*sharded, shared)
            assert jax.typeof(actual).sharding.spec == P(SPECS[spec][0])
            assert_close(actual, values)
            assert_close(transform(jax.vmap(jax.grad(total, wrt), axes))(*sharded, shared), gradients)
            sums = transform(jax.grad(lambda *a: mapped(*a).sum(), wrt))(*sharded, shared)
            assert_close(sums, (*gradients[:3], *(gradient.sum(0) for gradient in gradients[3:])))


def test_an_array_that_is_not_mapped_may_be_sharded_over_the_same_devices(arrays: list[jax.Array]) -> None:
    query, key, value = arrays
    total = loss("xla", {})
    expected = [total(query[i], key[0], value[0], jnp.zeros(4)) for i in range(len(query))]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows = jax.device_put(query, NamedSharding(mesh, P("x")))
        shared = [jax.device_put(array[0], NamedSharding(mesh, P("x"))) for array in (key, value)]
        actual = jax.vmap(lambda q: total(q, *shared, jnp.zeros(4)))(rows)
    assert_close(actual, np.stack(expected))


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_derivatives_beside_an_array_that_is_sharded_over_the_same_devices(
    arrays: list[jax.Array], backend: str
) -> None:
    query, key, value = arrays
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    total = lambda q, k, v: loss(backend, {})(q, k, v, jnp.zeros(4))
    slope = jax.grad(lambda q, k, v: (jax.grad(total)(q, k, v) ** 2).sum())
    tangent = lambda q, k, v: jax.jvp(total, (q, k, v), (q, k, v))[1]
    for function in (slope, tangent):
        expected = [function(query[i], key[0], value[0]) for i in range(len(query))]
        with jax.set_mesh(mesh):
            rows = jax.device_put(query, NamedSharding(mesh, P("x")))
            k, v = (jax.device_put(array[0], NamedSharding(mesh, P("x"))) for array in (key, value))
            assert_close(jax.jit(jax.vmap(partial(function, k=k, v=v)))(rows), np.stack(expected))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="maps over an axis that is sharded over 'x' too: reshard"):
        jax.vmap(lambda q: jax.grad(total, 1)(q, k, v))(rows)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_an_array_that_is_not_mapped_may_have_no_sharding(arrays: list[jax.Array], axis_type: Any) -> None:
    """The mapped array may come second. Gradients of both arrays are compared."""
    query, key, value = (array[0] for array in arrays)
    rows, sinks = arrays[0], jnp.arange(16.0).reshape(4, 4) / 8
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    shard = lambda array: jax.device_put(array, NamedSharding(mesh, P("x")))
    total = loss("xla", {})
    for function, mapped, shared in (
        (lambda q, k: total(q, k, value, jnp.ones(4)), rows, key),
        (lambda s, q: total(q, key, value, s), sinks, query),
    ):
        gradients = [jax.grad(function, (0, 1))(row, shared) for row in mapped]
        expected = jax.tree.map(lambda *leaves: np.stack(leaves), *gradients)
        actual = jax.jit(jax.vmap(jax.grad(function, (0, 1)), (0, None)))(shard(mapped), shared)
        assert_close(actual, expected)
        sums = jax.jit(jax.grad(lambda m, s, f=function: jax.vmap(f, (0, None))(m, s).sum(), (0, 1)))
        assert_close(sums(shard(mapped), shared), (expected[0], expected[1].sum(0)))


@pytest.mark.parametrize("options", OPTIONS)
def test_a_mesh_axis_of_vmap_around_shard_map(arrays: list[jax.Array], options: str) -> None:
    """The mapped array varies over one more mesh axis than the shared one, whose gradient is a sum over that axis."""
    rows, shared = arrays[0], arrays[1][0]
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def gradients(backend: str) -> Any:
        total = partial(
            ejkernel_core.call, "flash_attention", softmax_aux=jnp.ones(4), backend=backend, **OPTIONS[options]
        )
        sharded_total = jax.shard_map(
            lambda q, k: total(q, k, k), mesh=mesh, in_specs=(P("y"), P("y")), out_specs=P("y")
        )
        mapped = jax.vmap(sharded_total, (0, None), spmd_axis_name="x")
        return jax.jit(jax.grad(lambda q, k: (mapped(q, k) ** 2).sum(), (0, 1)))(rows, shared)

    assert_close(gradients("xla"), gradients("reference"))
