"""``jax.nn.dot_product_attention`` by the operation ``flash_attention``, with the same names and the same meanings.

``jax.nn`` counts positions from the first token: query ``i`` is at key ``i``. The operation counts them from the last
one. So where the lengths differ, causality and a window become another window of the operation, of the queries that
see a key and the keys that are seen: no mask is made.
"""

from __future__ import annotations

import numbers
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

import ejkernel_core
from ejkernel_ops.drop_in import drop_in
from ejkernel_ops.options import type_and_value

#: What ``jax.nn`` puts in the place of a masked logit, and so nearly the log-sum-exp of a row without visible keys.
MASKED_LOGIT = -0.7 * float(np.finfo(np.float32).max)
#: By the names of ``flash_attention``: those of ``jax.nn``.
NAMES = {
    "query": "query",
    "key": "key",
    "value": "value",
    "bias": "bias",
    "attention_mask": "mask",
    "softmax_scale": "scale",
    "causal": "is_causal",
    "sliding_window": "local_window_size",
    "backend": "implementation",
    "return_lse": "return_residual",
}


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: Literal[False] = False,
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


@drop_in(NAMES)
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``jax.nn.dot_product_attention`` by the best installed kernel for the device at hand.

    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 64))
    >>> out = dot_product_attention(query, key, value, is_causal=True, key_value_seq_lengths=jnp.array([100, 30]))
    >>> expected = jax.nn.dot_product_attention(
    ...     query, key, value, is_causal=True, key_value_seq_lengths=jnp.array([100, 30])
    ... )
    >>> bool(jnp.allclose(out, expected, atol=1e-5))
    True

    Args:
      query: (B, T, N, H) or (T, N, H).
      key, value: (B, S, K, H) or (S, K, H), of the query's dtype; N is a multiple of K.
      bias: Numbers that broadcast to (B, N, T, S), added to the logits; leading axes may be left out.
      mask: Booleans likewise: True where a query may see a key.
      scale: By default ``H ** -0.5``. An array, which may be traced and has a gradient, is multiplied into the query.
      is_causal: Query ``i`` sees no key after key ``i``, also where T and S differ.
      query_seq_lengths: (B,) integers: the output is 0 from there on.
      key_value_seq_lengths: (B,) integers: keys from there on are not seen, and neither they nor their values are used.
      local_window_size: (left, right): query ``i`` sees the keys from ``i - left`` to ``i + right``; an int is both.
      implementation: The backend "xla" or "cudnn" of this project, or None for the best one.
      return_residual: Also return the log-sum-exp of each row, (B, T, N) or (T, N), in the key's dtype, without a
        gradient.

    Returns:
      The output in the query's shape and dtype. A row that sees no key is the mean of all S values, as in
      ``jax.nn``; where S is 0, and in a call with ``key_value_seq_lengths``, it is 0. Such a row has the log-sum-exp
      -inf on the way, so outside of ``jit`` it ends a program under ``jax_debug_infs``.
    """
    shape = jnp.shape(query)
    q, k, v = (_with_batch(name, array) for name, array in (("query", query), ("key", key), ("value", value)))
    _check_shapes(q, k, v)
    scores = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    q, softmax_scale = _scaled(q, scale)
    out, lse = attend(
        (q, k, v),
        _bias(bias, scores),
        _mask(mask, scores),
        sides(is_causal, local_window_size),
        _lengths("query_seq_lengths", query_seq_lengths, scores[0]),
        _lengths("key_value_seq_lengths", key_value_seq_lengths, scores[0]),
        softmax_scale=softmax_scale,
        backend=_backend(implementation),
    )
    if not return_residual:
        return out.reshape(shape)
    return out.reshape(shape), jnp.where(lse == -jnp.inf, MASKED_LOGIT, lse).astype(k.dtype).reshape(shape[:-1])


def attend(
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    bias: jax.Array | None,
    mask: jax.Array | None,
    limits: tuple[int | None, int | None],
    q_lengths: jax.Array | None = None,
    kv_lengths: jax.Array | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp, (B, T, N), of query, key and value with all four axes.

    A bias and a mask have four axes too. ``limits`` are those of `placed`. ``q_lengths`` and ``kv_lengths``,
    (B,), say how many queries and keys a sequence has. ``options`` are the operation's; None means no option.
    """
    q, k, v = arrays
    length, kv_length = q.shape[1], k.shape[1]
    rows, keys, window = placed(length, kv_length, *limits)
    has_empty_rows = rows < length or (limits[1] is not None and limits[1] < 0)  # known before anything runs
    # Not with lengths: the mean would read the whole of a cache, and what its empty slots hold.
    has_mean = kv_length > 0 and kv_lengths is None and (mask is not None or has_empty_rows)
    options |= window
    options |= {"bias": _visible_part(bias, rows, keys), "attention_mask": _visible_part(mask, rows, keys)}
    if kv_lengths is not None:  # by position the same as ``window``, whose last query stands at the last key
        options |= {"q_start": keys - rows, "kv_lengths": _clipped(kv_lengths, keys)}

    present = {name: option for name, option in options.items() if option is not None}
    out, lse = ejkernel_core.call("flash_attention", q[:, :rows], k[:, :keys], v[:, :keys], **present, return_lse=True)

    out = _lengthened(out, length, 0)
    lse = _lengthened(jax.lax.stop_gradient(lse).mT, length, -jnp.inf)
    if has_mean:
        out = _with_mean_of_values(out, lse == -jnp.inf, v)
    if q_lengths is None:
        return out, lse
    in_query = (jnp.arange(length)[None] < q_lengths[:, None])[..., None]
    return jnp.where(in_query[..., None], out, 0), jnp.where(in_query, lse, -jnp.inf)


def placed(length: int, kv_length: int, left: int | None, right: int | None) -> tuple[int, int, dict[str, Any]]:
    """How many queries see a key, how many keys are seen, and the options by which the operation computes these.

    Query ``i`` sees the keys from ``i - left`` to ``i + right``; None means no limit, and a side may be below 0.

    >>> placed(4, 9, None, 0)  # causal, with more keys than queries: a square
    (4, 4, {'causal': True})
    >>> placed(9, 4, None, 0)  # the last of nine queries would be at the last of four keys, so it sees five more
    (9, 4, {'sliding_window': (13, 5)})
    >>> placed(9, 4, 1, 0)  # the last four queries see nothing
    (5, 4, {'sliding_window': (0, 1)})
    """
    keys = kv_length if right is None else max(0, min(kv_length, length + right))
    rows = length if left is None else max(0, min(length, keys + left))
    if 0 in (rows, keys) or (left is not None and right is not None and left + right < 0):
        return 0, keys, {}
    shift = keys - rows  # the operation has query i at key i + shift
    before = None if left is None or left + shift >= keys - 1 else left + shift
    after = None if right is None or right - shift >= rows - 1 else right - shift
    if (before, after) == (None, None):
        return rows, keys, {}
    if after == 0:  # kernels without a two-sided window take this one
        return rows, keys, {"causal": True} | ({} if before is None else {"sliding_window": (before, 0)})
    whole = rows + keys
    window = (whole if before is None else before, whole if after is None else after)
    return rows, keys, {"sliding_window": window}


def sides(is_causal: bool, window: Any) -> tuple[int | None, int | None]:
    """How many keys before and after the key of its own index a query sees; None means no limit."""
    if not isinstance(is_causal, (bool, np.bool_)):
        raise TypeError(f"is_causal: takes True or False, known while tracing; got {type_and_value(is_causal)}")
    pair = (window, window) if isinstance(window, numbers.Integral) else window
    if pair is None:
        return None, 0 if is_causal else None
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
    if not is_pair or not all(isinstance(side, numbers.Integral) for side in pair):
        raise TypeError(
            "local_window_size: takes an int, a pair (left, right) of ints, or None, known while tracing; got "
            f"{type_and_value(window)}"
        )
    left, right = (int(side) for side in pair)
    return left, min(right, 0) if is_causal else right


def _with_batch(name: str, array: ArrayLike) -> jax.Array:
    array = jnp.asarray(array)
    if array.ndim not in (3, 4):
        raise ValueError(f"{name}: takes (batch, length, heads, head_dim) or no batch; got shape {array.shape}")
    return array if array.ndim == 4 else array[None]


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    if value.shape != key.shape:
        raise ValueError(f"value: takes the key's shape {key.shape}; got {value.shape}")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"key: takes the batch and the head_dim of the query {query.shape}; got {key.shape}")
    if key.shape[2] == 0 or query.shape[2] % key.shape[2]:
        raise ValueError(f"query: heads must be a multiple of the key's {key.shape[2]}; got {query.shape[2]}")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"key, value: take the query's dtype {query.dtype}; got {key.dtype} and {value.dtype}")


def _backend(implementation: Any) -> str | None:
    if implementation not in (None, "xla", "cudnn"):
        raise ValueError(
            f"implementation: takes None, 'xla' or 'cudnn'; got {type_and_value(implementation)} (for another backend "
            "call ejkernel_ops.flash_attention with backend=)"
        )
    return implementation  # type: ignore[no-any-return]


def _scaled(query: jax.Array, scale: Any) -> tuple[jax.Array, float | None]:
    """The query and the operation's scale. An array is not static, so it is multiplied into the query."""
    if not isinstance(scale, (jax.Array, np.ndarray)):
        return query, scale
    if scale.size != 1:
        raise ValueError(f"scale: takes one number; got shape {scale.shape}")
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    return (query.astype(dtype) * scale.reshape(()).astype(dtype)).astype(query.dtype), 1.0


def _bias(bias: ArrayLike | None, scores: tuple[int, ...]) -> jax.Array | None:
    if bias is None:
        return None
    array = _over_scores("bias", jnp.asarray(bias), scores)
    is_taken = array.dtype in [jnp.dtype(name) for name in ("float16", "bfloat16", "float32", "float64")]
    return array if is_taken else array.astype(jnp.float32)


def _mask(mask: ArrayLike | None, scores: tuple[int, ...]) -> jax.Array | None:
    if mask is None:
        return None
    array = jnp.asarray(mask)
    if array.dtype != jnp.bool_:
        raise ValueError(f"mask: takes booleans; got {array.dtype} (numbers to add are bias)")
    return _over_scores("mask", array, scores)


def _over_scores(name: str, array: jax.Array, scores: tuple[int, ...]) -> jax.Array:
    """The array with four axes, each of which broadcasts to the axis of the scores."""
    shape = (*(1,) * (4 - array.ndim), *array.shape)
    if len(shape) != 4 or any(size not in (1, whole) for size, whole in zip(shape, scores, strict=True)):
        raise ValueError(f"{name}: takes a shape that broadcasts to (B, N, T, S) = {scores}; got {array.shape}")
    return array.reshape(shape)


def _visible_part(array: jax.Array | None, rows: int, keys: int) -> jax.Array | None:
    if array is None:
        return None
    return array[:, :, : max(rows, 1) if array.shape[2] == 1 else rows, : max(keys, 1) if array.shape[3] == 1 else keys]


def _lengths(name: str, lengths: ArrayLike | None, batch: int) -> jax.Array | None:
    if lengths is None:
        return None
    array = jnp.asarray(lengths)
    if array.shape != (batch,) or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(
            f"{name}: takes integers ({batch},), one for each batch entry; got {array.dtype} {array.shape}"
        )
    return array


def _clipped(lengths: jax.Array, most: int) -> jax.Array:
    """From 0 to ``most``, by a bound that fits into the dtype, which may be int8."""
    return jnp.clip(lengths, 0, min(most, jnp.iinfo(lengths.dtype).max)).astype(jnp.int32)


def _lengthened(array: jax.Array, length: int, fill: float) -> jax.Array:
    """Rows along axis 1 for the queries that see no key."""
    missing = length - array.shape[1]
    padding = [(0, missing if axis == 1 else 0) for axis in range(array.ndim)]
    return jnp.pad(array, padding, constant_values=fill) if missing else array


def _with_mean_of_values(out: jax.Array, is_empty: jax.Array, value: jax.Array) -> jax.Array:
    """The output with the mean of all values in rows that see no key: there ``jax.nn`` gives all keys equal weights."""
    dtype = jnp.promote_types(value.dtype, jnp.float32)
    mean = value.astype(dtype).mean(1, keepdims=True).astype(value.dtype)  # (B, 1, K, E)
    group = out.shape[2] // value.shape[2]
    if group > 1:  # not by ``jnp.repeat``, which would need a sharding where mesh axes are explicit
        batch, _, heads, dim = mean.shape
        mean = jnp.broadcast_to(mean[:, :, :, None], (batch, 1, heads, group, dim)).reshape(batch, 1, -1, dim)
    return jnp.where(is_empty[..., None], mean, out)


__test__ = {"dot_product_attention": dot_product_attention}  # doctest passes over decorated functions
