"""From a padded batch to packed tokens, and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._checks import as_integers, check_boundaries, check_countable, static_size, values
from ._lengths import boundaries_of


def pack(padded: ArrayLike, lengths: ArrayLike, *, total_length: int | None = None) -> tuple[jax.Array, jax.Array]:
    """The valid tokens of a padded batch in one axis, (total, ...), and their boundaries, (batch + 1,).

    >>> packed, cu_seqlens = pack(jnp.array([[1, 2, 3], [4, 0, 0]]), jnp.array([3, 1]), total_length=6)
    >>> packed, cu_seqlens
    (Array([1, 2, 3, 4, 0, 0], dtype=int32), Array([0, 3, 4], dtype=int32))

    It is linear in ``padded``, so it has gradients of every order. Those of the padding are 0.

    Args:
      padded: (batch, length, ...). Each row begins with its tokens.
      lengths: (batch,) integers from 0 to ``length``. Under jit they are clipped to this range.
      total_length: The length of the result, which is padded with 0: static. By default the sum of the lengths.
        Required under jit, where tokens that do not fit are left out; the boundaries are those of all tokens.
    """
    padded, lens = jnp.asarray(padded), as_integers(lengths, "lengths")
    if padded.ndim < 2 or lens.shape != padded.shape[:1]:
        raise ValueError(f"padded, lengths: take (batch, length, ...) and (batch,); got {padded.shape}, {lens.shape}")
    batch, length = padded.shape[:2]
    concrete = values(lengths)
    if concrete is not None and concrete.size and not (concrete.min() >= 0 and concrete.max() <= length):
        raise ValueError(f"lengths: takes integers from 0 to {length}; got {concrete.min()} to {concrete.max()}")
    check_countable(batch * length, "padded", lens.dtype)
    lens = jnp.clip(lens, 0, length)
    bounds = boundaries_of(lens)
    total = static_size(total_length, None if concrete is None else concrete.sum(dtype=int), "total_length")
    # The place of a token plus the padding of all rows before it. After the last boundary it is beyond the end.
    steps = jnp.ones(total, lens.dtype).at[bounds[1:]].add(length - lens, mode="drop")
    return _gather(padded.reshape(batch * length, *padded.shape[2:]), jnp.cumsum(steps) - 1, is_sorted=True), bounds


def unpack(packed: ArrayLike, cu_seqlens: ArrayLike, *, max_length: int | None = None) -> jax.Array:
    """Packed tokens as a batch that is padded with 0, (batch, max_length, ...): the inverse of ``pack``.

    >>> unpack(jnp.array([1, 2, 3, 4, 0]), jnp.array([0, 3, 4])).tolist()
    [[1, 2, 3], [4, 0, 0]]

    It is linear in ``packed``, so it has gradients of every order. Those of tokens after the last boundary are 0.

    Args:
      packed: (total, ...).
      cu_seqlens: The boundaries: integers from 0 that do not decrease. Under jit, tokens beyond ``total`` are 0.
      max_length: The length of each row: static. By default that of the longest sequence. Required under jit, where the
        ends of longer sequences are left out.
    """
    packed, bounds = jnp.asarray(packed), check_boundaries(cu_seqlens)
    if packed.ndim < 1:
        raise ValueError("packed: takes (total, ...); got a scalar")
    total, concrete = packed.shape[0], values(cu_seqlens)
    if concrete is not None and concrete[-1] > total:
        raise ValueError(f"cu_seqlens: takes boundaries of at most {total}, the length of packed; got {concrete[-1]}")
    longest_length = None if concrete is None else (concrete[1:] - concrete[:-1]).max(initial=0)
    length = static_size(max_length, longest_length, "max_length")
    check_countable(total + (bounds.size - 1) * length, "max_length", bounds.dtype)
    places = bounds[:-1, None] + jnp.arange(length, dtype=bounds.dtype)
    beyond = total + jnp.arange(places.size, dtype=bounds.dtype).reshape(places.shape)
    return _gather(packed, jnp.where(places < jnp.minimum(bounds[1:, None], total), places, beyond), is_sorted=False)


def _gather(rows: jax.Array, places: jax.Array, *, is_sorted: bool) -> jax.Array:
    """The rows at these places, which are all different. Those beyond the last row are 0."""
    if not rows.shape[0]:
        return jnp.zeros((*places.shape, *rows.shape[1:]), rows.dtype)
    return rows.at[places].get(mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=is_sorted)
