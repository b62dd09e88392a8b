"""Sizes of tiles and blocks, from the shapes of a call: (tokens of a tile, keys of a block, tiles at a time)."""

from __future__ import annotations

from ejkernel_core import Invocation
from ejkernel_ops.ragged_paged_attention import definition

Sizes = tuple[int, int, int]

MOST_QUERIES = 64
BLOCK = 128
#: Of the keys and values of all blocks that are read at a time, in 32 bits, by platform.
BLOCK_BYTES = {"cpu": 4 << 20, "gpu": 256 << 20, "tpu": 64 << 20}


def sizes(inv: Invocation) -> Sizes:
    """The best."""
    return space(inv)[0]


def space(inv: Invocation) -> list[Sizes]:
    """The best first."""
    if inv["split_size"] is not None:
        # Products of other shapes may be summed in another order.
        return [(_of_a_batch(inv), BLOCK, 1)]
    tile = _tile(inv)
    candidates = [(tile, BLOCK), (max(tile // 2, 1), BLOCK), (min(2 * tile, MOST_QUERIES), BLOCK), (tile, 4 * BLOCK)]
    return [(q_tile, block, _together(inv, block)) for q_tile, block in dict.fromkeys(candidates)]


def _of_a_batch(inv: Invocation) -> int:
    return min(int(inv["max_query_len"] or 16), 16)


def _tile(inv: Invocation) -> int:
    """A power of two, of about the tokens that a sequence has."""
    tokens, sequences = int(inv["query"].shape[0]), max(int(inv["kv_lens"].shape[0]), 1)
    most = min(int(inv["max_query_len"] or MOST_QUERIES), MOST_QUERIES)
    return min(most, 1 << max(-(-tokens // sequences) - 1, 0).bit_length())


def _together(inv: Invocation, block: int) -> int:
    """A power of two."""
    dims = int(inv["query"].shape[2]) + definition.value_dim(inv)
    of_a_tile = block * definition.kv_heads(inv) * dims * 4
    return 1 << (max(BLOCK_BYTES.get(inv.platform, BLOCK_BYTES["cpu"]) // of_a_tile, 1).bit_length() - 1)
