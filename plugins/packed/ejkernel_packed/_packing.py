"""From a padded batch to packed tokens, and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._checks import boundaries, countable, integers, size, values
from ._lengths import boundaries_of


def pack(padded: ArrayLike, lengths: ArrayLike, *, total_length: int | None = None) -> tuple[jax.Array, jax.Array]:
    """The valid tokens of a padded batch one behind the other, (total, ...), and their boundaries, (batch + 1,).

    >>> packed, cu_seqlens = pack(jnp.array([[1, 2, 3], [4, 0, 0]]), jnp.array([3, 1]), total_length=6)
    >>> packed, cu_seqlens
    (Array([1, 2, 3, 4, 0, 0], dtype=int32), Array([0, 3, 4], dtype=int32))

    Linear in ``padded``, so it has gradients of every order: 0 for the padding.

    Args:
      padded: (batch, length, ...), each row's tokens first.
      lengths: (batch,) integers from 0 to ``length``. Under jit they are taken into this range.
      total_length: Tokens in the result, filled up with 0: static. By default the sum of the lengths; under jit it has
        to be given, and tokens that do not fit are left out, while the boundaries are those of all.
    """
    padded, lens = jnp.asarray(padded), integers(lengths, "lengths")
    if padded.ndim < 2 or lens.shape != padded.shape[:1]:
        raise ValueError(f"padded, lengths: take (batch, length, ...) and (batch,); got {padded.shape}, {lens.shape}")
    batch, length = padded.shape[:2]
    seen = values(lengths)
    if seen is not None and seen.size and not (seen.min() >= 0 and seen.max() <= length):
        raise ValueError(f"lengths: are from 0 to {length}; got {seen.min()} to {seen.max()}")
    countable(batch * length, "padded", lens.dtype)
    lens = jnp.clip(lens, 0, length)
    bounds = boundaries_of(lens)
    total = size(total_length, None if seen is None else seen.sum(dtype=int), "total_length")
    # The place of a token, plus the padding of all rows before it: beyond the end for what is after the last boundary.
    skipped = jnp.ones(total, lens.dtype).at[bounds[1:]].add(length - lens, mode="drop")
    return _taken(padded.reshape(batch * length, *padded.shape[2:]), jnp.cumsum(skipped) - 1, in_order=True), bounds


def unpack(packed: ArrayLike, cu_seqlens: ArrayLike, *, max_length: int | None = None) -> jax.Array:
    """Packed tokens as a padded batch, (batch, max_length, ...), filled up with 0: what ``pack`` was given.

    >>> unpack(jnp.array([1, 2, 3, 4, 0]), jnp.array([0, 3, 4])).tolist()
    [[1, 2, 3], [4, 0, 0]]

    Linear in ``packed``, so it has gradients of every order: 0 for tokens after the last boundary.

    Args:
      packed: (total, ...).
      cu_seqlens: The boundaries: integers from 0 that do not decrease. Under jit, tokens beyond ``total`` are 0.
      max_length: The length of each row: static. By default that of the longest sequence; under jit it has to be
        given, and the ends of longer sequences are left out.
    """
    packed, bounds = jnp.asarray(packed), boundaries(cu_seqlens)
    if packed.ndim < 1:
        raise ValueError("packed: takes (total, ...); got a scalar")
    total, seen = packed.shape[0], values(cu_seqlens)
    if seen is not None and seen[-1] > total:
        raise ValueError(f"cu_seqlens: ends at most at {total}, the length of packed; got {seen[-1]}")
    longest = None if seen is None else (seen[1:] - seen[:-1]).max(initial=0)
    length = size(max_length, longest, "max_length")
    countable(total + (bounds.size - 1) * length, "max_length", bounds.dtype)
    places = bounds[:-1, None] + jnp.arange(length, dtype=bounds.dtype)
    beyond = total + jnp.arange(places.size, dtype=bounds.dtype).reshape(places.shape)
    return _taken(packed, jnp.where(places < jnp.minimum(bounds[1:, None], total), places, beyond), in_order=False)


def _taken(rows: jax.Array, places: jax.Array, *, in_order: bool) -> jax.Array:
    """The rows at these places, no two of them equal; 0 for places beyond the last."""
    if not rows.shape[0]:
        return jnp.zeros((*places.shape, *rows.shape[1:]), rows.dtype)
    return rows.at[places].get(mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=in_order)
