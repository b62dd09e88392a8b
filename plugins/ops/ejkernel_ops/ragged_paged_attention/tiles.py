"""Tiles of queries: some tokens of one sequence, one after another. They are the work of kernels, listed on the device.

A list has a place for as many tiles as there can be. Those that there are come first, in the order of the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ejkernel_ops.arrays import check_integers
from ejkernel_ops.pages import int32, one_integer

#: The tokens of tiles for which `paged_attention_metadata` has a list.
TILE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def tile_bound(tokens: int, sequences: int, size: int) -> int:
    """The most tiles of ``size`` tokens that sequences of so many tokens in all can have.

    >>> tile_bound(10, 3, 4)
    5
    """
    return min(tokens, tokens // size + sequences)


def list_tiles(query_start_loc: jax.Array, num_seqs: jax.Array | None, tokens: int, size: int) -> jax.Array:
    """(2, `tile_bound`): the sequence of each tile, or -1 behind the last one, and its first token.

    >>> list_tiles(jnp.array([0, 5, 5, 7]), None, 8, 4).tolist()
    [[0, 0, 2, -1, -1], [0, 4, 5, 0, 0]]
    """
    starts, ends = query_start_loc[:-1], query_start_loc[1:]
    sequences = starts.shape[0]
    counts = -(-jnp.maximum(jnp.minimum(ends, tokens) - starts, 0) // size)
    if num_seqs is not None:
        counts = jnp.where(jnp.arange(sequences) < num_seqs, counts, 0)
    last = jnp.cumsum(counts)
    tile = jnp.arange(tile_bound(tokens, sequences, size), dtype=jnp.int32)
    # The last tile of each sequence is the first one of the next.
    sequence = jnp.searchsorted(last, tile, side="right", method="compare_all").astype(jnp.int32)
    own = jnp.minimum(sequence, sequences - 1)
    first_token = starts[own] + (tile - (last - counts)[own]) * size
    is_there = sequence < sequences
    return jnp.stack([jnp.where(is_there, sequence, -1), jnp.where(is_there, first_token, 0)]).astype(jnp.int32)


def paged_attention_metadata(
    kv_lens: ArrayLike, query_start_loc: ArrayLike, num_seqs: ArrayLike | None = None, *, num_tokens: int
) -> jax.Array:
    """What kernels of ``ragged_paged_attention`` need to know of a step, for all of its layers.

    Without it, each call computes what its kernel needs. It lists the tokens, and does not depend on ``kv_lens`` yet:
    they are an argument so that programs stay as they are when it does.

    >>> import jax.numpy as jnp
    >>> paged_attention_metadata(jnp.array([9, 4]), jnp.array([0, 1, 2]), num_tokens=2).dtype
    dtype('int32')

    Args:
      kv_lens, query_start_loc, num_seqs: As in ``ragged_paged_attention``.
      num_tokens: The length of the queries.

    Returns:
      One array of integers, whose length follows from the number of tokens and of sequences.
    """
    if not isinstance(num_tokens, Integral) or isinstance(num_tokens, bool) or num_tokens < 0:
        raise ValueError(f"num_tokens: takes an int of at least 0; got {num_tokens!r}")
    lengths, starts = jnp.asarray(kv_lens), jnp.asarray(query_start_loc)
    for name, array, words in (("kv_lens", lengths, ""), ("query_start_loc", starts, " + 1")):
        check_integers(name, array)
        if array.ndim != 1:
            raise ValueError(f"{name}: takes (sequences{words},); got shape {array.shape}")
    if starts.shape[0] != lengths.shape[0] + 1:
        raise ValueError(
            f"query_start_loc: takes (sequences + 1,) for the {lengths.shape[0]} of kv_lens; got shape {starts.shape}"
        )
    starts = int32(starts)
    count = None if num_seqs is None else one_integer("num_seqs", jnp.asarray(num_seqs))
    return jnp.concatenate([list_tiles(starts, count, num_tokens, size).reshape(-1) for size in TILE_SIZES])


def metadata_length(tokens: int, sequences: int) -> int:
    """The length of what `paged_attention_metadata` returns."""
    return sum(2 * tile_bound(tokens, sequences, size) for size in TILE_SIZES)


def tiles(arguments: Mapping[str, Any], size: int) -> jax.Array:
    """The tiles of a call with prepared arguments, from its metadata where it has them: (2, `tile_bound`)."""
    tokens, starts, metadata = arguments["query"].shape[0], arguments["query_start_loc"], arguments["metadata"]
    sequences = starts.shape[0] - 1
    if metadata is None or size not in TILE_SIZES:
        return list_tiles(starts, arguments["num_seqs"], tokens, size)
    first = sum(2 * tile_bound(tokens, sequences, other) for other in TILE_SIZES if other < size)
    count = tile_bound(tokens, sequences, size)
    return jax.lax.slice(metadata, (first,), (first + 2 * count,)).reshape(2, count)
