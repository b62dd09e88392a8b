"""Positions and ids of the tokens of packed sequences, computed as cumulative sums of steps at the boundaries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._checks import as_integers, check_boundaries, num_tokens, static_size, values


def prepare_position_ids(cu_seqlens: ArrayLike, *, total_length: int | None = None) -> jax.Array:
    """The position of each token in its sequence, from 0; 0 for padding.

    >>> prepare_position_ids(jnp.array([0, 3, 5, 9]))
    Array([0, 1, 2, 0, 1, 0, 1, 2, 3], dtype=int32)

    Args:
      cu_seqlens: The boundaries: integers from 0 that do not decrease.
      total_length: The number of tokens, including padding after the last boundary: static. By default the last
        boundary. Required under jit, where tokens beyond it are left out.
    """
    bounds = check_boundaries(cu_seqlens)
    total = static_size(total_length, num_tokens(cu_seqlens), "total_length")
    steps = jnp.ones(total, bounds.dtype).at[bounds[1:]].add(bounds[:-1] - bounds[1:], mode="drop")
    return jnp.where(jnp.arange(total) < bounds[-1], jnp.cumsum(steps) - 1, 0)


def prepare_sequence_ids(cu_seqlens: ArrayLike, *, total_length: int | None = None) -> jax.Array:
    """The sequence of each token, from 0; -1 for padding. The arguments are those of ``prepare_position_ids``.

    >>> prepare_sequence_ids(jnp.array([0, 3, 5, 9]))
    Array([0, 0, 0, 1, 1, 2, 2, 2, 2], dtype=int32)
    >>> prepare_sequence_ids(jnp.array([0, 2, 2, 3]), total_length=5)
    Array([ 0,  0,  2, -1, -1], dtype=int32)
    """
    return segment_ids_from_cu_seqlens(cu_seqlens, total_length=total_length) - 1


def prepare_token_indices(cu_seqlens: ArrayLike, *, total_length: int | None = None) -> jax.Array:
    """The (sequence, position) of each token: (total, 2), with (-1, 0) for padding.

    >>> prepare_token_indices(jnp.array([0, 2, 3])).tolist()
    [[0, 0], [0, 1], [1, 0]]

    The arguments are those of ``prepare_position_ids``.
    """
    sequences = prepare_sequence_ids(cu_seqlens, total_length=total_length)
    return jnp.stack([sequences, prepare_position_ids(cu_seqlens, total_length=total_length)], axis=1)


def segment_ids_from_cu_seqlens(cu_seqlens: ArrayLike, *, total_length: int | None = None) -> jax.Array:
    """The segment id of each token: the number of its sequence, from 1; 0 for padding.

    >>> segment_ids_from_cu_seqlens(jnp.array([0, 2, 2, 3]), total_length=5)
    Array([1, 1, 3, 0, 0], dtype=int32)

    The arguments are those of ``prepare_position_ids``.
    """
    bounds = check_boundaries(cu_seqlens)
    total = static_size(total_length, num_tokens(cu_seqlens), "total_length")
    steps = jnp.ones_like(bounds).at[-1].set(1 - bounds.size)
    return jnp.cumsum(jnp.zeros(total, bounds.dtype).at[bounds].add(steps, mode="drop"))


def cu_seqlens_from_segment_ids(segment_ids: ArrayLike, *, num_sequences: int | None = None) -> jax.Array:
    """The boundaries of the sequences 1, 2, ... with these segment ids. A sequence without tokens is empty.

    >>> cu_seqlens_from_segment_ids(jnp.array([1, 1, 3, 0, 0]))
    Array([0, 2, 2, 3], dtype=int32)

    Args:
      segment_ids: Integers (total,) that do not decrease, then padding, which is 0 or less. Under jit the order is not
        checked: the length of a sequence is the number of its tokens.
      num_sequences: The number of sequences: static. By default the greatest id, without empty sequences after it.
        Required under jit, where greater ids are left out.
    """
    ids = as_integers(segment_ids, "segment_ids")
    if ids.ndim != 1:
        raise ValueError(f"segment_ids: takes rank 1; got the shape {ids.shape}")
    if (concrete := values(segment_ids)) is not None:
        token_ids = concrete[concrete > 0].astype(np.int64)
        if (concrete[: token_ids.size] <= 0).any() or (np.diff(token_ids) < 0).any():
            raise ValueError("segment_ids: takes ids that do not decrease, and padding last")
    greatest = None if concrete is None else concrete.max(initial=0)
    count = static_size(num_sequences, greatest, "num_sequences")
    counts = jnp.zeros(count + 1, ids.dtype).at[jnp.maximum(ids, 0)].add(1, mode="drop")
    return jnp.cumsum(counts.at[0].set(0))
