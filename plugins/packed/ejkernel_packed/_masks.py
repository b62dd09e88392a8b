"""Segment ids as attention masks, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._checks import as_booleans, as_integers, values

BITS = 32


def segment_ids_to_mask(
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike], dtype: Any = jnp.bool_, return_separate_masks: bool = False
) -> Any:
    """The mask (..., queries, keys) that is True where ids are equal and above 0. Ids of 0 and less are padding.

    >>> segment_ids_to_mask(jnp.array([[1, 1, 2, 0]]), dtype=jnp.int32)[0].tolist()
    [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    >>> segment_ids_to_mask((jnp.array([[1, 2]]), jnp.array([[1, 2, 2]])), dtype=jnp.int32)[0].tolist()
    [[1, 0, 0], [0, 1, 1]]

    Args:
      segment_ids: Integers (..., length), or a tuple of the queries' ids and the keys' ids.
      dtype: The dtype of the masks. One that is not boolean has the values 1 and 0.
      return_separate_masks: Return (the mask of valid queries, the mask of valid keys, the mask).
    """
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    if len(pair) != 2:
        raise ValueError(f"segment_ids: takes an array, or a tuple of two; got {len(pair)}")
    queries, keys = (as_integers(ids, "segment_ids") for ids in pair)
    if queries.ndim < 1 or keys.ndim < 1 or queries.shape[:-1] != keys.shape[:-1]:
        raise ValueError(
            f"segment_ids: takes shapes that differ in the last axis alone; got {queries.shape} and {keys.shape}"
        )
    mask = (queries[..., :, None] == keys[..., None, :]) & (queries > 0)[..., :, None]
    if not return_separate_masks:
        return mask.astype(dtype)
    return (queries > 0).astype(dtype), (keys > 0).astype(dtype), mask.astype(dtype)


def mask_to_segment_ids(mask: ArrayLike, per_head: bool = False) -> tuple[jax.Array, jax.Array]:
    """The segment ids of the queries and of the keys, as int32. Equal rows of the mask have one id, and equal columns.

    >>> mask = jnp.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0]])
    >>> mask_to_segment_ids(mask)
    (Array([1, 1, 2], dtype=int32), Array([ 1,  1,  2, -1], dtype=int32))

    Ids start at 1. Rows are numbered in the order in which they first appear, columns in the order of the first row
    that has them; empty rows and columns have -1. ``segment_ids_to_mask`` restores a mask of segments, in any order of
    its tokens. It cannot restore another mask, such as a causal one, for which there are no ids.

    Args:
      mask: (Q, K), (batch, Q, K) or (batch, heads, Q, K); booleans, or integers 0 and 1 (under jit, all integers but 0
        are True). The ids have its leading axes.
      per_head: Return ids for each head of a mask with heads. Without it the ids have no axis for heads, and a mask
        that differs between heads is a ``ValueError``; under jit, the first head counts.
    """
    mask_array = as_booleans(mask)
    if not 2 <= mask_array.ndim <= 4:
        raise ValueError(f"mask: takes (Q, K), (batch, Q, K) or (batch, heads, Q, K); got the shape {mask_array.shape}")
    if mask_array.ndim == 4 and not per_head:
        mask_array = _first_head(mask_array)
    if not mask_array.size:
        queries, keys = (jnp.full((*mask_array.shape[:-2], count), -1, jnp.int32) for count in mask_array.shape[-2:])
    else:
        queries, keys = _ids(mask_array.reshape(-1, *mask_array.shape[-2:]))
    return queries.reshape(*mask_array.shape[:-1]), keys.reshape(*mask_array.shape[:-2], mask_array.shape[-1])


def _first_head(mask: jax.Array) -> jax.Array:
    if not mask.shape[1]:
        raise ValueError(f"mask: has no heads to take one of; got the shape {mask.shape}")
    if (concrete := values(mask)) is not None and (concrete != concrete[:, :1]).any():
        raise ValueError("mask: is not the same for all heads; per_head=True gives ids for each of them")
    return mask[:, 0]


@jax.jit
def _ids(masks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The ids of the rows and of the columns of masks (n, Q, K), none of which is empty."""
    order = jnp.broadcast_to(jnp.arange(masks.shape[1]), masks.shape[:2])
    columns = masks.swapaxes(1, 2)
    return jax.vmap(_number_rows)(masks, order), jax.vmap(_number_rows)(columns, jnp.argmax(columns, axis=2))


def _number_rows(rows: jax.Array, order: jax.Array) -> jax.Array:
    """Number the rows from 1, by ``order`` and then by place. Equal rows have one number; rows without True -1."""
    first = _first_equal(_words(rows))
    count, is_nonempty = rows.shape[0], rows.any(axis=1)
    is_first = (first == jnp.arange(count)) & is_nonempty
    sorted_rows = jnp.argsort(jnp.where(is_first, order, count + rows.shape[1]), stable=True)
    numbers = jnp.zeros(count, jnp.int32).at[sorted_rows].set(jnp.arange(1, count + 1, dtype=jnp.int32))
    return jnp.where(is_nonempty, numbers[first], -1)


def _words(rows: jax.Array) -> jax.Array:
    """Rows of bits as rows of uint32."""
    padded = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % BITS)))
    bits = padded.reshape(rows.shape[0], -1, BITS).astype(jnp.uint32)
    return (bits << jnp.arange(BITS, dtype=jnp.uint32)).sum(axis=2, dtype=jnp.uint32)


def _first_equal(words: jax.Array) -> jax.Array:
    """For each row, the place of the first row that is equal to it.

    Rows are sorted by a hash of 64 bits, and then neighbours with the same hash are compared as a whole. If two of them
    differ, this is repeated with another hash. So the result is always exact.
    """
    count = words.shape[0]

    def attempt(seed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        places = jnp.arange(count, dtype=jnp.int32)
        high, low, order = jax.lax.sort((*_hashes(words, seed), places), num_keys=3)
        same = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
        equal = (words[order[1:]] == words[order[:-1]]).all(axis=1)
        starts = jnp.where(jnp.pad(~same, (1, 0), constant_values=True), places, 0)
        return places.at[order].set(order[jax.lax.cummax(starts)]), (same & ~equal).any(), seed + 1

    initial = (jnp.zeros(count, jnp.int32), jnp.array(True), jnp.uint32(0))
    return jax.lax.while_loop(lambda state: state[1], lambda state: attempt(state[2]), initial)[0]


def _hashes(words: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two hashes of each row: sums of its words, each mixed with a key of its own."""
    column = jnp.arange(words.shape[1], dtype=jnp.uint32)
    keys = (_mix(_mix(column + 1) ^ _mix(2 * seed + i)) for i in range(2))
    high, low = (_mix(_mix(words ^ key) + key).sum(axis=1, dtype=jnp.uint32) for key in keys)
    return high, low


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every bit affects all bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
