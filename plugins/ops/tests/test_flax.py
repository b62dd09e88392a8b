"""``ejkernel_ops.flax.dot_product_attention`` in flax's modules: values, gradients and training as with flax's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops.flax import dot_product_attention

flax = pytest.importorskip("flax", reason="flax is an extra of the development environment")
linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")


def inputs(*batch: int, length: int = 5, kv_length: int = 7, dtype: str = "float32") -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(3), 3)
    return [
        jax.random.normal(k, (*batch, n, 2, 8), dtype)
        for k, n in zip(keys, (length, kv_length, kv_length), strict=True)
    ]


def booleans(*shape: int) -> jax.Array:
    return jax.random.bernoulli(jax.random.key(6), 0.6, shape)


CASES: dict[str, tuple[list[jax.Array], dict[str, Any]]] = {
    "no batch": (inputs(), {"mask": booleans(1, 5, 7)}),
    "a row sees nothing": (inputs(2), {"mask": booleans(2, 1, 5, 7).at[1, 0, 2].set(False)}),
    "two batch axes": (inputs(2, 3), {"mask": booleans(2, 1, 1, 5, 7).astype(jnp.float32)}),
    "bias": (inputs(2, 3), {"bias": jax.random.normal(jax.random.key(1), (1, 1, 2, 1, 7))}),
    "value dim": ([*inputs(2)[:2], inputs(2)[2][..., :5]], {"mask": booleans(2, 1, 5, 7)}),
    "dtype": (inputs(2, dtype="bfloat16"), {"dtype": jnp.float32}),
    "float16": (inputs(2, dtype="float16"), {"mask": booleans(2, 1, 5, 7).at[1, 0, 2].set(False)}),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    arrays, options = CASES[name]

    def results(function: Any) -> Any:
        loss = lambda *arrays: (jnp.sin(function(*arrays, **options)) ** 2).sum()
        gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)
        return function(*arrays, **options), gradients

    actual, expected = map(results, (dot_product_attention, linen.dot_product_attention))
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        atol = 2e-5 if x.dtype == jnp.float32 else 1e-2
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), atol=atol, rtol=1e-2)


@pytest.mark.parametrize("sizes", [(5, 5), (5, 7), (7, 5)], ids=str)
def test_causality_starts_at_the_first_token(sizes: tuple[int, int]) -> None:
    query, key, value = inputs(2, length=sizes[0], kv_length=sizes[1])
    expected = nnx.dot_product_attention(query, key, value, is_causal=True)
    out = dot_product_attention(query, key, value, is_causal=True)
    np.testing.assert_allclose(out, expected, atol=2e-5)


def descend(loss: Any, parameters: Any, steps: int = 4) -> tuple[list[float], Any]:
    """The losses of some steps of gradient descent, and the parameters after them."""
    step = jax.jit(jax.value_and_grad(loss))
    losses = []
    for _ in range(steps):
        value, gradients = step(parameters)
        parameters = jax.tree.map(lambda p, g: p - 0.5 * g, parameters, gradients)
        losses.append(float(value))
    return losses, parameters


def assert_same_training(train: Any, flax_attention: Any) -> None:
    losses, parameters = train(dot_product_attention)
    expected_losses, expected = train(flax_attention)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    assert losses[-1] < 0.9 * losses[0]
    for x, y in zip(jax.tree.leaves(parameters), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4)


X, TARGET = jax.random.normal(jax.random.key(8), (2, 2, 6, 16))


def test_a_linen_module_is_trained() -> None:
    mask = linen.make_causal_mask(jnp.ones((2, 6)))

    def train(attention_fn: Any) -> Any:
        module = linen.MultiHeadDotProductAttention(num_heads=2, attention_fn=attention_fn)
        parameters = module.init(jax.random.key(0), X, mask=mask)
        return descend(lambda p: ((module.apply(p, X, mask=mask) - TARGET) ** 2).mean(), parameters)

    assert_same_training(train, linen.dot_product_attention)


def test_an_nnx_module_is_trained() -> None:
    mask = linen.make_attention_mask(jnp.arange(6)[None] < 4, jnp.arange(6)[None] < 5)  # rows 4 and 5 see nothing

    def train(attention_fn: Any) -> Any:
        module = nnx.MultiHeadAttention(2, 16, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0))
        graph, parameters = nnx.split(module, nnx.Param)
        loss = lambda p: ((nnx.merge(graph, p)(X, mask=mask) - TARGET) ** 2).mean()
        return descend(loss, parameters)

    assert_same_training(train, nnx.dot_product_attention)


TRANSFORMS = ("jit", "vmap of grad", "grad of vmap", "checkpoint")


def gradients_of(loss: Any, wrt: Any, transform: str, arrays: Any, shared: Any = ()) -> Any:
    """The gradients of a loss of arrays, whose first axis is mapped, and of what is not mapped."""
    axes = (*(None,) * len(shared), *(0,) * len(arrays))
    if transform == "grad of vmap":
        return jax.jit(jax.grad(lambda *a: jax.vmap(loss, axes)(*a).sum(), wrt))(*shared, *arrays)
    if transform == "vmap of grad":
        return jax.jit(jax.vmap(jax.grad(loss, wrt), axes))(*shared, *arrays)
    one = [array[1] for array in arrays]
    return jax.jit(jax.grad(jax.checkpoint(loss) if transform == "checkpoint" else loss, wrt))(*shared, *one)


def assert_close(actual: Any, expected: Any) -> None:
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4, rtol=1e-4)
    assert max(np.abs(y).max() for y in jax.tree.leaves(expected)) > 0.1  # that of a key's bias is 0


@pytest.mark.parametrize("wrt", [(0,), (1, 2), (0, 3), (2, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_two_calls_of_one_program_that_are_differentiated_in_different_arguments(wrt: Any, transform: str) -> None:
    """The first call has a cotangent for its query alone, or none at all, where the second has others."""
    query, key, value = (jnp.stack([array, -array, 2 * array]) for array in inputs(2))
    bias = jax.random.normal(jax.random.key(5), (3, 2, 1, 5, 7))
    weights = jax.random.normal(jax.random.key(9), query.shape)
    mask = booleans(2, 1, 5, 7).at[1, 0, 2].set(False)

    def gradients(function: Any) -> Any:
        def loss(query: Any, key: Any, value: Any, bias: Any, weight: Any) -> Any:
            first = function(query, jax.lax.stop_gradient(key), value, mask=mask)
            second = function(first, key, value, bias)
            return (second * weight).sum() + (function(query, key, value, bias, mask) * weight).sum()

        return gradients_of(loss, wrt, transform, (query, key, value, bias, weights))

    assert_close(gradients(dot_product_attention), gradients(linen.dot_product_attention))


@pytest.mark.parametrize("wrt", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_two_modules_of_one_program(wrt: Any, transform: str) -> None:
    """One attends to the output of the other; the first, the second or neither is trained."""
    x, target = jax.random.normal(jax.random.key(10), (2, 3, 2, 6, 16))
    mask = linen.make_causal_mask(jnp.ones((2, 6)))

    def gradients(attention_fn: Any) -> Any:
        modules = [linen.MultiHeadDotProductAttention(num_heads=n, attention_fn=attention_fn) for n in (2, 4)]
        parameters = [module.init(jax.random.key(n), x[0], x[0]) for n, module in enumerate(modules)]

        def loss(first: Any, second: Any, x: Any, target: Any) -> Any:
            inner = modules[0].apply(first, x, mask=mask)
            out = modules[1].apply(second, x, inner) + modules[1].apply(second, inner, x, mask=mask)
            return ((out - target) ** 2).sum()

        return gradients_of(loss, wrt, transform, (x, target), parameters)

    with jax.default_matmul_precision("highest"):
        assert_close(gradients(dot_product_attention), gradients(linen.dot_product_attention))


def test_dropout_has_the_right_mean() -> None:
    """It drops other weights than flax does, with the same probability."""
    query, key = (jnp.zeros((1, 64, 2, 8)) for _ in range(2))
    value = jnp.ones((1, 64, 2, 8))
    module = linen.MultiHeadDotProductAttention(num_heads=2, dropout_rate=0.25, attention_fn=dot_product_attention)
    parameters = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X, deterministic=False)
    apply = lambda seed: module.apply(parameters, X, deterministic=False, rngs={"dropout": jax.random.key(seed)})
    assert (apply(1) == apply(1)).all()
    assert (apply(1) != apply(2)).any()

    out = dot_product_attention(query, key, value, dropout_rng=jax.random.PRNGKey(4), dropout_rate=0.25)
    assert abs(out.mean() - 1) < 0.03
    assert out.std() > 0.03
    still = dot_product_attention(query, key, value, dropout_rate=0.25, deterministic=True)
    np.testing.assert_allclose(still, value, atol=1e-6)


def test_what_cannot_be_had_is_refused() -> None:
    query, key, value = inputs(2)
    with pytest.raises(TypeError, match="keyword argument 'causal'; 'causal' is called 'is_causal' here"):
        dot_product_attention(query, key, value, causal=True)  # type: ignore[call-arg]
    with pytest.raises(NotImplementedError, match="module: the weights are never in memory"):
        linen.MultiHeadDotProductAttention(num_heads=2, attention_fn=dot_product_attention).init(
            jax.random.key(0), X, sow_weights=True
        )
    for name in ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"):
        with pytest.raises(NotImplementedError, match=f"{name}: a kernel computes its own products"):
            dot_product_attention(query, key, value, **{name: jnp.einsum})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dropout_rng: dropout_rate above 0 takes a random key"):
        dot_product_attention(query, key, value, dropout_rate=0.5)
    with pytest.raises(
        ValueError, match=r"mask: takes a shape that broadcasts to \(batch..., N, T, S\) = \(2, 2, 5, 7\)"
    ):
        dot_product_attention(query, key, value, mask=booleans(5, 6))
    with pytest.raises(ValueError, match="value: takes the batch axes of the query"):
        dot_product_attention(query, key, value[0])
    for wrong in (value[:, :-1], jnp.concatenate([value, value], 1)):
        with pytest.raises(ValueError, match="value: takes the length and the heads of the key"):
            dot_product_attention(query, key, wrong)
