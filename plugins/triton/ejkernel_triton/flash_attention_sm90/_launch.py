"""What both passes are launched with."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ejkernel_triton.flash_attention._problem import Arguments
from ejkernel_triton.launch import _jax_triton


def width(dim: int) -> int:
    """What a head dim is padded to in shared memory and registers.

    >>> width(40), width(96), width(192)
    (64, 128, 256)
    """
    return next(most for most in (64, 128, 256) if dim <= most)


def tiled(array: jax.Array, rows: int, columns: int) -> Any:
    """An array of (batch, length, heads, dim), in tiles of one head; what lies beyond comes as 0."""
    gl = _language()
    block = (1, rows, 1, columns)
    layout = gl.NVMMASharedLayout.get_default_for(block, getattr(gl, np.dtype(array.dtype).name))
    return _jax_triton.described(array, block, layout)


def numbered(array: jax.Array, count: int) -> Any:
    """An array of (rows, length), of which so many numbers at a time."""
    gl = _language()
    return _jax_triton.described(array, (1, count), gl.NVMMASharedLayout(0, 32, 2))


def rows_of_threads(array: jax.Array) -> Any:
    """An array of (rows, 32), of which 128 rows at a time: one for each thread of four warps."""
    gl = _language()
    return _jax_triton.described(array, (128, 32), gl.NVMMASharedLayout.get_default_for((128, 32), gl.float32))


def _language() -> Any:
    with _jax_triton.importing():
        from triton.experimental.gluon import language
    return language


def constants(a: Arguments) -> dict[str, Any]:
    """Those that both passes have."""
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
    }
