"""The tokens of tiles, and what the shapes of programs are chosen by."""

from __future__ import annotations

import attrs

from ejkernel_core import Invocation
from ejkernel_ops.calibration import get_shared_memory_limit
from ejkernel_ops.pages import pages_of
from ejkernel_ops.ragged_paged_attention.definition import kv_heads, most_keys, value_dim
from ejkernel_ops.ragged_paged_attention.tiles import tile_bound
from ejkernel_triton.flash_attention_decode._tiling import LEAST_ROWS, MOST_ROWS, SPLITS
from ejkernel_triton.flash_attention_sm90._launch import width
from ejkernel_triton.launch._cards import capability, multiprocessors
from ejkernel_triton.ragged_paged_attention import _tiling as portable
from ejkernel_triton.ragged_paged_attention._tiling import group, longest
from ejkernel_triton.split_keys.shapes import Problem

#: Of values of 8 bits.
LEAST_COLUMNS = 128


@attrs.frozen
class Tile:
    """Some tokens of a sequence, with all heads of a key head."""

    #: A power of two.
    tokens: int
    #: One for each token and head, and padding up to a power of two.
    rows: int
    #: How many tiles read the same blocks.
    together: int


def tile(inv: Invocation, programs: int) -> Tile:
    """As many tokens as fit, if a sequence may have so many. With a ``split_size`` the tile of the portable kernel,
    which does not depend on how many tokens and sequences there are.
    """
    most, heads = most_rows(inv), group(inv)
    if inv["split_size"] is not None:
        tokens, _, rows = portable.tile(inv)
        return Tile(tokens, rows, 1)
    tokens = min(1 << ((most // heads).bit_length() - 1), 1 << (longest(inv) - 1).bit_length())
    rows = max(LEAST_ROWS, 1 << (tokens * heads - 1).bit_length())
    return Tile(tokens, rows, 2 if programs == 1 and longest(inv) > tokens else 1)


def widths(inv: Invocation) -> tuple[int, int]:
    """The columns of keys and values in shared memory."""
    own = width(inv["query"].shape[2]), width(value_dim(inv))
    # Of 8 bits there are 64 words of two, as many as the hardware multiplies at a time.
    return own if itemsize(inv) > 1 else (own[0], max(own[1], LEAST_COLUMNS))


def itemsize(inv: Invocation) -> int:
    """Of a number in the pages."""
    return int(pages_of(inv)[0].dtype.itemsize)


def most_rows(inv: Invocation) -> int:
    columns = max(width(inv["query"].shape[2]), width(value_dim(inv)))
    return next(rows for most_columns, rows in MOST_ROWS if columns <= most_columns)


def problem(inv: Invocation) -> Problem:
    """Of a call."""
    tiles = [tile(inv, programs) for programs in (1, 2)]
    tokens, sequences, heads = inv["query"].shape[0], inv["kv_lens"].shape[0], kv_heads(inv)
    parts = [heads * tile_bound(tokens, sequences, one.tokens * one.together) for one in tiles]
    left, right = portable.sides(inv)
    most = most_keys(inv)
    is_large = inv["split_size"] is not None and portable.part_bytes(inv, 1) > portable.PART_BYTES
    return Problem(
        tiles[0].rows,
        (tiles[0].together, tiles[1].together),
        (parts[0], parts[1]),
        most if left < 0 or right < 0 else min(most, left + right + tiles[0].tokens * tiles[0].together),
        *widths(inv),
        int(inv["query"].dtype.itemsize),
        multiprocessors(inv),
        get_shared_memory_limit(compute_capability=capability(inv)),
        inv["split_size"] or 0,
        1 if is_large else SPLITS[-1],
        itemsize(inv),
    )
