"""Segment ids as attention masks, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._checks import booleans, integers, values

BITS = 32


def segment_ids_to_mask(
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike], dtype: Any = jnp.bool_, return_separate_masks: bool = False
) -> Any:
    """Who sees whom, (..., queries, keys): tokens whose ids are equal and above 0. Ids of 0 and less are padding.

    >>> segment_ids_to_mask(jnp.array([[1, 1, 2, 0]]), dtype=jnp.int32)[0].tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    >>> segment_ids_to_mask((jnp.array([[1, 2]]), jnp.array([[1, 2, 2]])), dtype=jnp.int32)[0].tolist()
    [[1, 0, 0], [0, 1, 1]]

    Args:
      segment_ids: Integers (..., length), or a tuple of those of the queries and of the keys.
      dtype: Of the masks: 1 and 0 where it is not boolean.
      return_separate_masks: Return (the queries that are no padding, the keys that are none, the mask).
    """
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    if len(pair) != 2:
        raise ValueError(f"segment_ids: takes an array, or a tuple of two; got {len(pair)}")
    queries, keys = (integers(ids, "segment_ids") for ids in pair)
    if queries.ndim < 1 or keys.ndim < 1 or queries.shape[:-1] != keys.shape[:-1]:
        raise ValueError(f"segment_ids: differ in the last axis alone; got {queries.shape} and {keys.shape}")
    mask = (queries[..., :, None] == keys[..., None, :]) & (queries > 0)[..., :, None]
    if not return_separate_masks:
        return mask.astype(dtype)
    return (queries > 0).astype(dtype), (keys > 0).astype(dtype), mask.astype(dtype)


def mask_to_segment_ids(mask: ArrayLike, per_head: bool = False) -> tuple[jax.Array, jax.Array]:
    """Segment ids of the queries and of the keys, in int32: equal rows of the mask have one id, and so equal columns.

    >>> mask = jnp.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0]])
    >>> mask_to_segment_ids(mask)
    (Array([1, 1, 2], dtype=int32), Array([ 1,  1,  2, -1], dtype=int32))

    Ids count from 1, rows in the order in which they first appear, columns in the order in which rows first see them;
    empty ones have -1. So a mask of segments comes back from ``segment_ids_to_mask``, in whatever order its tokens
    are. Another mask (a causal one) does not: ids cannot say it.

    Args:
      mask: (Q, K), (batch, Q, K) or (batch, heads, Q, K); booleans, or integers 0 and 1, of which under jit all but 0
        are True. The ids have its leading axes.
      per_head: Ids for each head of a mask with heads. Without it the ids have no heads, and a mask that is not the
        same for all of them is a ``ValueError``; under jit the first head is taken.
    """
    seen = booleans(mask)
    if not 2 <= seen.ndim <= 4:
        raise ValueError(f"mask: takes (Q, K), (batch, Q, K) or (batch, heads, Q, K); got the shape {seen.shape}")
    if seen.ndim == 4 and not per_head:
        seen = _one_head(seen)
    if not seen.size:
        queries, keys = (jnp.full((*seen.shape[:-2], count), -1, jnp.int32) for count in seen.shape[-2:])
    else:
        queries, keys = _ids(seen.reshape(-1, *seen.shape[-2:]))
    return queries.reshape(*seen.shape[:-1]), keys.reshape(*seen.shape[:-2], seen.shape[-1])


def _one_head(mask: jax.Array) -> jax.Array:
    if not mask.shape[1]:
        raise ValueError(f"mask: has no heads to take one of; got the shape {mask.shape}")
    if (known := values(mask)) is not None and (known != known[:, :1]).any():
        raise ValueError("mask: is not the same for all heads; per_head=True gives ids for each of them")
    return mask[:, 0]


@jax.jit
def _ids(masks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of masks (n, Q, K), none of them empty."""
    order = jnp.broadcast_to(jnp.arange(masks.shape[1]), masks.shape[:2])
    columns = masks.swapaxes(1, 2)
    return jax.vmap(_numbered)(masks, order), jax.vmap(_numbered)(columns, jnp.argmax(columns, axis=2))


def _numbered(rows: jax.Array, order: jax.Array) -> jax.Array:
    """One number for equal rows, from 1, first by ``order``, then by place; -1 for rows without a True."""
    first = _first_equal(_words(rows))
    count, filled = rows.shape[0], rows.any(axis=1)
    counts = (first == jnp.arange(count)) & filled
    turns = jnp.argsort(jnp.where(counts, order, count + rows.shape[1]), stable=True)
    numbers = jnp.zeros(count, jnp.int32).at[turns].set(jnp.arange(1, count + 1, dtype=jnp.int32))
    return jnp.where(filled, numbers[first], -1)


def _words(rows: jax.Array) -> jax.Array:
    """Rows of bits as rows of uint32."""
    filled = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % BITS)))
    bits = filled.reshape(rows.shape[0], -1, BITS).astype(jnp.uint32)
    return (bits << jnp.arange(BITS, dtype=jnp.uint32)).sum(axis=2, dtype=jnp.uint32)


def _first_equal(words: jax.Array) -> jax.Array:
    """For each row the place of the first row that equals it.

    Rows are sorted by 64 bits of hash; then neighbours with one hash are compared whole. Should two of them differ,
    all begins again with another hash: the answer never rests on a hash alone.
    """
    count = words.shape[0]

    def attempt(seed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        places = jnp.arange(count, dtype=jnp.int32)
        high, low, turn = jax.lax.sort((*_hashes(words, seed), places), num_keys=3)
        same = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
        equal = (words[turn[1:]] == words[turn[:-1]]).all(axis=1)
        begins = jnp.where(jnp.pad(~same, (1, 0), constant_values=True), places, 0)
        return places.at[turn].set(turn[jax.lax.cummax(begins)]), (same & ~equal).any(), seed + 1

    begin = (jnp.zeros(count, jnp.int32), jnp.array(True), jnp.uint32(0))
    return jax.lax.while_loop(lambda state: state[1], lambda state: attempt(state[2]), begin)[0]


def _hashes(words: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two numbers for each row: sums of its words, each mixed with a key of its own."""
    column = jnp.arange(words.shape[1], dtype=jnp.uint32)
    keys = (_mixed(_mixed(column + 1) ^ _mixed(2 * seed + i)) for i in range(2))
    high, low = (_mixed(_mixed(words ^ key) + key).sum(axis=1, dtype=jnp.uint32) for key in keys)
    return high, low


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection of uint32 that spreads every bit over all of them."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
