"""Chunks of packed sequences. Each sequence is split by itself, and its last chunk may be short."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from ._checks import int_at_least
from ._lengths import boundaries_of, cdiv, prepare_lens
from ._tokens import prepare_token_indices


def prepare_chunk_offsets(cu_seqlens: ArrayLike, chunk_size: int) -> jax.Array:
    """The number of chunks before each sequence, and at the end the number of all. An empty sequence has none.

    >>> import jax.numpy as jnp
    >>> prepare_chunk_offsets(jnp.array([0, 5, 5, 9]), 4)
    Array([0, 2, 2, 3], dtype=int32)

    Args:
      cu_seqlens: The boundaries: integers from 0 that do not decrease.
      chunk_size: The number of tokens in a full chunk, at least 1: static.
    """
    return boundaries_of(cdiv(prepare_lens(cu_seqlens), int_at_least(chunk_size, 1, "chunk_size")))


def prepare_chunk_indices(cu_seqlens: ArrayLike, chunk_size: int, *, total_chunks: int | None = None) -> jax.Array:
    """(sequence, chunk in the sequence) of each chunk, both from 0: (total, 2). Padding is (-1, 0).

    >>> import jax.numpy as jnp
    >>> prepare_chunk_indices(jnp.array([0, 5, 5, 9]), 4).tolist()
    [[0, 0], [0, 1], [2, 0]]
    >>> prepare_chunk_indices(jnp.array([0, 5, 5, 9]), 4, total_chunks=4).tolist()
    [[0, 0], [0, 1], [2, 0], [-1, 0]]

    Args:
      cu_seqlens: The boundaries: integers from 0 that do not decrease.
      chunk_size: The number of tokens in a full chunk, at least 1: static.
      total_chunks: The number of rows: static. By default the number of chunks. Required under jit, where chunks that
        do not fit are left out (``cdiv(total_length, chunk_size)`` plus the number of sequences is always enough).
    """
    offsets = prepare_chunk_offsets(cu_seqlens, chunk_size)
    try:
        return prepare_token_indices(offsets, total_length=total_chunks)
    except ValueError as error:
        raise ValueError(str(error).replace("total_length", "total_chunks")) from None
