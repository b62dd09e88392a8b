"""``jax.vmap`` over an axis that is sharded over explicit mesh axes: as a loop on one device, by value."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ejkernel_core

#: What is mapped: the axis that is sharded alone, with heads over another mesh axis, or over two of them at once.
SPECS = {"alone": P("x"), "beside-heads": P("x", None, None, "y"), "over-two": P(("x", "y")), "of-batch": P("x", "y")}
#: With dropout a call loops; without it folds the mapped axis into the batch, or loops for the gradient of sinks.
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


def stacked(function: Any, arrays: Any, sinks: Any) -> Any:
    rows = [function(*(array[i] for array in arrays), sinks) for i in range(len(arrays[0]))]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def close(got: Any, wanted: Any) -> None:
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5), got, wanted)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_values_and_gradients(arrays: list[jax.Array], backend: str, spec: str, options: str) -> None:
    sinks = jnp.arange(4.0)
    total = loss(backend, OPTIONS[options])
    wrt = (0, 1, 2, 3) if options == "looped" else (0, 1, 2)
    mapped, axes = jax.vmap(total, (0, 0, 0, None)), (0, 0, 0, None)
    values, each = stacked(total, arrays, sinks), stacked(jax.grad(total, wrt), arrays, sinks)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(array, NamedSharding(mesh, SPECS[spec])) for array in arrays]
        shared = jax.device_put(sinks, NamedSharding(mesh, P()))
        for transform in (lambda f: f, jax.jit):
            got = transform(mapped)(*sharded, shared)
            assert jax.typeof(got).sharding.spec == P(SPECS[spec][0])
            close(got, values)
            close(transform(jax.vmap(jax.grad(total, wrt), axes))(*sharded, shared), each)
            summed = transform(jax.grad(lambda *a: mapped(*a).sum(), wrt))(*sharded, shared)
            close(summed, (*each[:3], *(gradient.sum(0) for gradient in each[3:])))


def test_an_array_that_is_not_mapped_may_be_sharded_over_the_same_devices(arrays: list[jax.Array]) -> None:
    query, key, value = arrays
    total = loss("xla", {})
    wanted = [total(query[i], key[0], value[0], jnp.zeros(4)) for i in range(len(query))]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows = jax.device_put(query, NamedSharding(mesh, P("x")))
        shared = [jax.device_put(array[0], NamedSharding(mesh, P("x"))) for array in (key, value)]
        got = jax.vmap(lambda q: total(q, *shared, jnp.zeros(4)))(rows)
    close(got, np.stack(wanted))


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_what_is_shared_may_come_from_outside_of_the_mesh(arrays: list[jax.Array], kind: Any) -> None:
    """And what is mapped may be an array after the first: gradients of both."""
    query, key, value = (array[0] for array in arrays)
    rows, sinks = arrays[0], jnp.arange(16.0).reshape(4, 4) / 8
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
    put = lambda array: jax.device_put(array, NamedSharding(mesh, P("x")))
    total = loss("xla", {})
    for function, mapped, shared in (
        (lambda q, k: total(q, k, value, jnp.ones(4)), rows, key),
        (lambda s, q: total(q, key, value, s), sinks, query),
    ):
        each = [jax.grad(function, (0, 1))(row, shared) for row in mapped]
        wanted = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
        got = jax.jit(jax.vmap(jax.grad(function, (0, 1)), (0, None)))(put(mapped), shared)
        close(got, wanted)
        summed = jax.jit(jax.grad(lambda m, s, f=function: jax.vmap(f, (0, None))(m, s).sum(), (0, 1)))
        close(summed(put(mapped), shared), (wanted[0], wanted[1].sum(0)))


@pytest.mark.parametrize("options", OPTIONS)
def test_a_mesh_axis_of_vmap_around_shard_map(arrays: list[jax.Array], options: str) -> None:
    """Inside, what is mapped varies over one mesh axis more than what is shared, whose gradient is a sum over it."""
    rows, shared = arrays[0], arrays[1][0]
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

    def gradients(backend: str) -> Any:
        total = partial(
            ejkernel_core.call, "flash_attention", softmax_aux=jnp.ones(4), backend=backend, **OPTIONS[options]
        )
        parts = jax.shard_map(lambda q, k: total(q, k, k), mesh=mesh, in_specs=(P("y"), P("y")), out_specs=P("y"))
        mapped = jax.vmap(parts, (0, None), spmd_axis_name="x")
        return jax.jit(jax.grad(lambda q, k: (mapped(q, k) ** 2).sum(), (0, 1)))(rows, shared)

    close(gradients("xla"), gradients("reference"))
