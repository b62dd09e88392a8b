"""``moe_order`` against NumPy's ``argsort`` and ``bincount``, and gradients through layers that use it."""

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
from ejkernel_ops import grouped_matmul, moe_combine, moe_order, moe_permute, moe_permute_matmul, moe_route

RNG = np.random.default_rng(7)
BACKENDS = ("reference", "xla")
DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def expected(experts: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The sizes and the order. A number that is not an expert counts as one more, the last."""
    numbers = [int(expert) if 0 <= expert < count else count for expert in experts.reshape(-1)]
    return np.bincount(numbers, minlength=count + 1)[:count], np.argsort(np.array(numbers, int), kind="stable")


def check(experts: np.ndarray, count: int, backend: str) -> None:
    order = moe_order(jnp.asarray(experts), count, backend=backend)
    for result, array in zip(order, expected(experts, count), strict=True):
        assert result.dtype == jnp.int32
        np.testing.assert_array_equal(result, array)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [1, 5, 300])
@pytest.mark.parametrize(("tokens", "k"), [(0, 2), (1, 1), (77, 3), (1000, 1)])
def test_values(tokens: int, k: int, count: int, backend: str) -> None:
    check(RNG.integers(0, count, (tokens, k)), count, backend)
    check(RNG.integers(-count, 2 * count, (tokens, k)), count, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_integer_is_an_expert_or_none(dtype: str, backend: str) -> None:
    """Also those that another dtype would hold as an expert: 2 ** 32 + 1 is not 1, and 300 is not an int8."""
    limits = np.iinfo(dtype)
    ends = [limits.min, limits.max, limits.max // 2 + 1, limits.max - 1, 2**32 + 1, 2**31 + 1, -(2**32) + 1, 299]
    numbers = [*RNG.integers(0, 9, 40).tolist(), *(end for end in ends if limits.min <= end <= limits.max), 0, 1]
    experts = np.array(numbers, dtype)[:, None]
    with jax.enable_x64(True):
        for count in (1, 9, 300):
            check(experts, count, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_as_many_experts_and_places_as_an_int32_has_pairs(backend: str) -> None:
    """And one expert more: a kernel may have a number for each pair."""
    count = 2**31 // 2200 - 1
    for num_experts in (count, count + 1):
        experts = RNG.integers(num_experts - 50, num_experts + 50, (1100, 2))
        check(experts, num_experts, backend)


def test_the_order_is_that_of_moe_route() -> None:
    routes = moe_route(jnp.asarray(RNG.standard_normal((50, 12)), jnp.float32), 3)
    sizes, order = moe_order(routes.experts, 12)
    np.testing.assert_array_equal(sizes, routes.group_sizes)
    np.testing.assert_array_equal(order, routes.token_order)


@pytest.mark.parametrize("backend", BACKENDS)
def test_transformed(backend: str) -> None:
    call = partial(moe_order, num_experts=6, backend=backend)
    experts = RNG.integers(-1, 8, (2, 3, 10, 4))
    for function in (jax.vmap(jax.vmap(call)), jax.jit(jax.vmap(jax.vmap(call)))):
        sizes, order = function(experts)
        for place in np.ndindex(2, 3):
            np.testing.assert_array_equal(sizes[place], expected(experts[place], 6)[0])
            np.testing.assert_array_equal(order[place], expected(experts[place], 6)[1])
    for result, array in zip(jax.jit(call)(experts[0, 0]), expected(experts[0, 0], 6), strict=True):
        np.testing.assert_array_equal(result, array)


@pytest.mark.parametrize("backend", BACKENDS)
def test_over_devices(backend: str) -> None:
    """In ``shard_map`` each device orders its own tokens. Outside of it the order is one for all of them."""
    call = partial(moe_order, num_experts=6, backend=backend)
    experts = RNG.integers(-1, 8, (40, 4))
    mesh = jax.make_mesh((4,), ("tokens",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    sizes, order = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("tokens"), out_specs=P("tokens")))(experts)
    parts = [expected(part, 6) for part in np.split(experts, 4)]
    np.testing.assert_array_equal(sizes, np.concatenate([part[0] for part in parts]))
    np.testing.assert_array_equal(order, np.concatenate([part[1] for part in parts]))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4,), ("tokens",), axis_types=(kind,), devices=jax.devices()[:4])
        for spec in (P("tokens"), P(None, "tokens")):
            sharded = jax.device_put(experts, NamedSharding(mesh, spec))
            for result, array in zip(jax.jit(call)(sharded), expected(experts, 6), strict=True):
                np.testing.assert_array_equal(result, array)


# -- layers ------------------------------------------------------------------------------------------------------------

TOKENS, EXPERTS, K, DIM, INNER = 23, 5, 2, 4, 6
#: A hash of the number of each token. Some have an expert twice, some two; some of -1 and EXPERTS, which are none.
HASHED = (np.arange(TOKENS)[:, None] * 3 + np.arange(TOKENS)[:, None] % 2 * np.array([0, 6])) % (EXPERTS + 2) - 1
Parameters = dict[str, Any]


def parameters() -> Parameters:
    shapes = {
        "x": (TOKENS, DIM),
        "weights": (TOKENS, K),
        "up": (EXPERTS, DIM, INNER),
        "down": (EXPERTS, INNER, DIM),
    }
    return {name: RNG.standard_normal(shape) for name, shape in shapes.items()}


def by_parts(arrays: Parameters) -> jax.Array:
    sizes, order = moe_order(HASHED, EXPERTS)
    hidden = jnp.tanh(grouped_matmul(moe_permute(arrays["x"], order, K), arrays["up"], sizes))
    return moe_combine(grouped_matmul(hidden, arrays["down"], sizes), order, arrays["weights"])


def in_place(arrays: Parameters) -> jax.Array:
    sizes, order = moe_order(HASHED, EXPERTS)
    hidden = jnp.tanh(moe_permute_matmul(arrays["x"], order, arrays["up"], sizes, K))
    return moe_combine(grouped_matmul(hidden, arrays["down"], sizes), order, arrays["weights"])


def dense(arrays: Parameters) -> jax.Array:
    """All experts for all tokens, of which a token takes its own ones; without an expert it takes 0."""
    of_all = jnp.einsum("tei,eid->ted", jnp.tanh(jnp.einsum("td,edi->tei", arrays["x"], arrays["up"])), arrays["down"])
    share = jnp.einsum("tk,tke->te", arrays["weights"], HASHED[..., None] == np.arange(EXPERTS))
    return jnp.einsum("te,ted->td", share, of_all)


@pytest.mark.parametrize("layer", [by_parts, in_place])
def test_gradients_of_a_layer_with_a_hash(layer: Any) -> None:
    """In float64, against a dense layer that JAX differentiates."""
    assert {-1, EXPERTS} < {*HASHED.ravel()}
    ct = RNG.standard_normal((TOKENS, DIM))
    with jax.enable_x64(True):
        arrays = jax.tree.map(jnp.asarray, parameters())
        values, gradients = jax.jit(jax.value_and_grad(lambda arrays: (layer(arrays) * ct).sum()))(arrays)
        expected_values, expected_gradients = jax.value_and_grad(lambda arrays: (dense(arrays) * ct).sum())(arrays)
        np.testing.assert_allclose(layer(arrays), dense(arrays), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(values, expected_values, rtol=1e-12)
    for name, gradient in expected_gradients.items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=1e-11, atol=1e-12, err_msg=name)
    np.testing.assert_array_equal(gradients["weights"][(HASHED < 0) | (HASHED == EXPERTS)], 0)


def test_rows_without_an_expert_may_hold_anything() -> None:
    """A token of NaN that was dropped changes no gradient of a matrix."""
    arrays = jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), parameters())
    dropped = (HASHED < 0) | (HASHED == EXPERTS)
    tokens = np.flatnonzero(dropped.all(1))
    assert 0 < tokens.size < dropped.any(1).sum()
    loss = lambda matrices, x: (by_parts({**arrays, **matrices, "x": x}) ** 2).sum()
    matrices = {name: arrays[name] for name in ("up", "down")}
    clean = jax.grad(loss)(matrices, arrays["x"].at[tokens].set(0))
    for name, gradient in jax.grad(loss)(matrices, arrays["x"].at[tokens].set(jnp.nan)).items():
        np.testing.assert_array_equal(gradient, clean[name])


def test_experts_that_are_traced_have_no_gradients() -> None:
    """An integer that depends on a parameter stops its gradient, in reverse and in forward mode."""
    rows = jnp.asarray(RNG.standard_normal((9, 3)), jnp.float32)

    def loss(scale: jax.Array) -> jax.Array:
        sizes, order = moe_order(jnp.int32(jnp.abs(scale * rows[:, :2]) * 3), 4)
        return (moe_permute(rows * scale, order, 2) * jnp.arange(18.0)[:, None]).sum() + sizes[0] * scale

    def with_constants(scale: jax.Array) -> jax.Array:
        sizes, order = (jax.lax.stop_gradient(a) for a in moe_order(jnp.int32(jnp.abs(1.5 * rows[:, :2]) * 3), 4))
        return (moe_permute(rows * scale, order, 2) * jnp.arange(18.0)[:, None]).sum() + sizes[0] * scale

    for derivative in (jax.grad, jax.jacfwd):
        np.testing.assert_allclose(derivative(loss)(1.5), derivative(with_constants)(1.5), rtol=1e-6)


def test_samples_are_experts() -> None:
    inv = ejkernel_core.invocation("moe_order", jax.ShapeDtypeStruct((500, 4), jnp.int32), 7)
    samples = inv.operation.samples(inv, jax.random.key(0))
    assert {*np.unique(samples["experts"]).tolist()} == {*range(7)}


def test_calls_of_about_as_many_places_are_tuned_as_one() -> None:
    key = lambda *shape, count=8: ejkernel_core.invocation(
        "moe_order", jax.ShapeDtypeStruct(shape, jnp.int32), count
    ).tuning_keys[-1]
    assert key(100, 4) == key(65, 7) == key(512, 1)
    assert key(100, 4) != key(100, 8)
    assert key(100, 4) != key(100, 4, count=9)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"experts": jnp.ones((3, 2))}, TypeError, "experts: takes integers; got float32"),
        ({"experts": jnp.ones((3, 2), bool)}, TypeError, "experts: takes integers; got bool"),
        ({"experts": jnp.ones(3, int)}, ValueError, "experts: takes (tokens, k); got shape (3,)"),
        ({"num_experts": 0}, ValueError, "num_experts: takes a number from 1 to 2147483647, the largest int32; got 0"),
        ({"num_experts": 2**31}, ValueError, "the largest int32; got 2147483648"),
        ({"num_experts": 4.0}, TypeError, "num_experts: takes an int, known while tracing; got float 4.0"),
        ({"num_experts": True}, TypeError, "num_experts: takes an int, known while tracing; got bool True"),
        ({"topk_ids": jnp.ones((3, 2), int)}, TypeError, "'topk_ids' is called 'experts' here"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as raised:
        ejkernel_core.call("moe_order", **{"experts": jnp.ones((3, 2), int), "num_experts": 4, **arguments})
    assert text in str(raised.value)
