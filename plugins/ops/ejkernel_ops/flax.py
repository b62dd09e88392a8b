"""An ``attention_fn`` for the attention modules of flax, ``linen`` and ``nnx``, by the operation ``flash_attention``.

It has the arguments of ``flax.linen.dot_product_attention`` and of ``flax.nnx.dot_product_attention``. flax is not
imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from .drop_in import drop_in
from .jax_nn import attend, sides

#: By the names of ``flash_attention``: those of flax.
NAMES = {
    "query": "query",
    "key": "key",
    "value": "value",
    "bias": "bias",
    "attention_mask": "mask",
    "causal": "is_causal",
    "dropout_prob": "dropout_rate",
    "dropout_seed": "dropout_rng",
}
#: Arguments that change how flax computes its weights, which are never in memory here.
REFUSED = {
    "module": "the weights are never in memory, so none can be sown: leave out sow_weights",
    "einsum_dot_general": "a kernel computes its own products",
    "qk_attn_weights_einsum": "a kernel computes its own products",
    "attn_weights_value_einsum": "a kernel computes its own products",
}


@drop_in(NAMES)
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Any] | None = None,
    qk_attn_weights_einsum: Callable[..., Any] | None = None,
    attn_weights_value_einsum: Callable[..., Any] | None = None,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
) -> jax.Array:
    """``dot_product_attention`` of flax by the best installed kernel for the device at hand.

    ``MultiHeadDotProductAttention(num_heads=8, attention_fn=ejkernel_ops.flax.dot_product_attention)`` uses it.

    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 5, 100, 4, 64))
    >>> dot_product_attention(query, key, value, mask=jnp.tri(100)[None, None, None]).shape
    (2, 5, 100, 4, 64)

    Args:
      query: (batch..., T, N, H), with any number of batch axes, or none.
      key, value: (batch..., S, K, H) and (batch..., S, K, E); N is a multiple of K.
      bias: Numbers that broadcast to (batch..., N, T, S), added to the logits.
      mask: Broadcasts likewise: a query sees a key where it is not 0. A row that sees nothing is the mean of all
        values.
      broadcast_dropout: Makes no difference: every head of every batch drops its own weights.
      dropout_rng: A random key. The weights that are dropped are others than those that flax drops for it.
      dropout_rate: The probability with which a weight is dropped.
      deterministic: True to drop none.
      dtype: The dtype of the inputs and the output; by default the one to which the inputs are promoted.
      precision: Makes no difference: products of float32 are of full precision.
      module: Refused, as ``einsum_dot_general``, ``qk_attn_weights_einsum`` and ``attn_weights_value_einsum`` are.
      force_fp32_for_softmax: Makes no difference: the softmax is in float32 or better.
      promote_dtype: The function that promotes the inputs, as ``nnx`` has it.
      is_causal: Query ``i`` sees no key after key ``i``, also where T and S differ.
    """
    arguments = locals()
    for name, reason in REFUSED.items():
        if arguments[name] is not None:
            raise NotImplementedError(f"{name}: {reason}")
    q, k, v = _promoted((query, key, value), dtype, promote_dtype)
    _check_shapes(q, k, v)
    batch = q.shape[:-3]
    scores = (*batch, q.shape[-2], q.shape[-3], k.shape[-3])
    weights_mask = None if mask is None else _over_scores("mask", jnp.asarray(mask) != 0, scores)
    weights_bias = None if bias is None else _over_scores("bias", _floating(bias), scores)
    out, _ = attend(
        (_flat(q), _flat(k), _flat(v)),
        weights_bias,
        weights_mask,
        sides(is_causal, None),
        **_dropout(deterministic, dropout_rate, dropout_rng),
    )
    return out.reshape(*batch, *out.shape[1:])


def _promoted(arrays: tuple[ArrayLike, ...], dtype: Any, promote_dtype: Any) -> Any:
    if promote_dtype is not None:
        return promote_dtype(arrays, dtype=dtype)
    if dtype is None:
        dtype = jnp.result_type(*arrays)
        dtype = dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.promote_types(dtype, jnp.float32)
    return tuple(jnp.asarray(array, dtype) for array in arrays)


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    if query.ndim < 3:
        raise ValueError(f"query: takes (batch..., length, heads, head_dim); got shape {query.shape}")
    for name, array in (("key", key), ("value", value)):
        if array.ndim != query.ndim or array.shape[:-3] != query.shape[:-3]:
            raise ValueError(f"{name}: takes the batch axes of the query {query.shape}; got shape {array.shape}")
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(f"value: takes the length and the heads of the key {key.shape}; got shape {value.shape}")


def _flat(array: jax.Array) -> jax.Array:
    """With one batch axis."""
    return array.reshape(math.prod(array.shape[:-3]), *array.shape[-3:])


def _floating(bias: ArrayLike) -> jax.Array:
    array = jnp.asarray(bias)
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(jnp.float32)


def _over_scores(name: str, array: jax.Array, scores: tuple[int, ...]) -> jax.Array:
    """The array with one batch axis, of size 1 where it broadcasts over all batch axes."""
    shape = (*(1,) * (len(scores) - array.ndim), *array.shape)
    if len(shape) != len(scores) or any(size not in (1, whole) for size, whole in zip(shape, scores, strict=True)):
        raise ValueError(f"{name}: takes a shape that broadcasts to (batch..., N, T, S) = {scores}; got {array.shape}")
    batch = shape[:-3]
    if any(size != 1 for size in batch):
        batch = scores[:-3]
    return jnp.broadcast_to(array.reshape(shape), (*batch, *shape[-3:])).reshape(math.prod(batch), *shape[-3:])


def _dropout(deterministic: bool, rate: float, key: jax.Array | None) -> dict[str, Any]:
    if deterministic or rate == 0:
        return {}
    if key is None:
        raise ValueError("dropout_rng: dropout_rate above 0 takes a random key, unless deterministic is True; got None")
    return {"dropout_prob": rate, "dropout_seed": jax.random.bits(key)}


__test__ = {"dot_product_attention": dot_product_attention}  # doctest passes over decorated functions
