"""Arrays and constants of the launches of both passes."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel_ops.flash_attention.positions import has_positions
from ejkernel_triton.flash_attention._problem import Arguments
from ejkernel_triton.launch import _jax_triton


def width(dim: int) -> int:
    """The size that a head dim is padded to in shared memory and registers.

    >>> width(40), width(96), width(192)
    (64, 128, 256)
    """
    return next(size for size in (64, 128, 256) if dim <= size)


def tiled(array: jax.Array, rows: int, columns: int) -> Any:
    """An array of (batch, length, heads, dim), in tiles of one head; reads beyond its end give 0."""
    return _jax_triton.describe(array, (1, rows, 1, columns))


def numbered(array: jax.Array, count: int) -> Any:
    """An array of (rows, length), in blocks of ``count`` numbers."""
    return _jax_triton.describe(array, (1, count), swizzle=0)


def rows_of_threads(array: jax.Array) -> Any:
    """An array of (rows, 32), in blocks of 128 rows: one for each thread of four warps."""
    return _jax_triton.describe(array, (128, 32))


def constants(a: Arguments) -> dict[str, Any]:
    """The constants that both passes have."""
    _, _, heads, dim = a["query"].shape
    return {
        "HEADS": heads,
        "GROUP": heads // a["key"].shape[2],
        "DIM": dim,
        "WIDTH": width(dim),
        "SCALE": float(a["softmax_scale"]),
        "CAP": float(a["logits_soft_cap"] or 0.0),
        "PACKED": a["cum_seqlens_q"] is not None,
        "SEGMENTS": a["q_segment_ids"] is not None,
        "START": has_positions(a),
        "LENGTHS": a["kv_lengths"] is not None,
        "SLOTS": a["kv_positions"] is not None,
    }
