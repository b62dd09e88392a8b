"""Both launches of a call: the sums of each split, and their combination, which is that of the portable kernel."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel_core import Invocation
from ejkernel_ops.pages import pages_of
from ejkernel_ops.ragged_paged_attention.definition import kv_heads, page_size, value_dim
from ejkernel_ops.ragged_paged_attention.tiles import tiles
from ejkernel_triton.flash_attention._problem import operands
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability, multiprocessors
from ejkernel_triton.ragged_paged_attention._launch import combined, outputs
from ejkernel_triton.ragged_paged_attention._tiling import part_count, sides
from ejkernel_triton.ragged_paged_attention_sm90 import _tiling
from ejkernel_triton.split_keys.shapes import registers

KERNEL = "ejkernel_triton.ragged_paged_attention_sm90._device:attend"
SCALES = ("k_scale", "v_scale")


def attention(inv: Invocation, splits: int, block: int, stages: int, num_warps: int, programs: int) -> tuple[Any, Any]:
    """The output, and the lse if it is needed."""
    query, sinks, pages = inv["query"], inv["softmax_aux"], pages_of(inv)
    tile = _tiling.tile(inv, programs)
    work = tiles(inv, tile.tokens * tile.together)
    parts = splits * work.shape[1] * kv_heads(inv)
    piece = min(block, page_size(inv))
    widths = _tiling.widths(inv)
    arrays = (query, *(_described(x, piece, size) for x, size in zip((pages[0], pages[-1]), widths, strict=True)))
    lists = (*(inv[name] for name in ("block_tables", "kv_lens", "query_start_loc", "num_seqs", "first_page")), work)
    left, right = sides(inv)
    sums = _jax_triton.call(
        KERNEL,
        operands(inv, (*arrays, *lists, inv["k_scale"], inv["v_scale"], sinks)),
        outputs(inv, splits),
        scalars=(
            *(x.shape[0] for x in (query, inv["kv_lens"])),
            inv["block_tables"].shape[1],
            pages[0].shape[0],
            work.shape[1],
        ),
        grid=(min(parts, programs * multiprocessors(inv)),),
        constants={
            "PARTS": parts,
            "HEADS": query.shape[1],
            "GROUP": query.shape[1] // kv_heads(inv),
            "DIM": query.shape[2],
            "V_DIM": value_dim(inv),
            "SCALE": float(inv["softmax_scale"]),
            "CAP": float(inv["logits_soft_cap"] or 0.0),
            "LEFT": left,
            "RIGHT": right,
            "INTERLEAVED": inv["kv_pages"] is not None,
            "FIRST_PAGE": inv["first_page"] is not None,
            "NUM_SEQS": inv["num_seqs"] is not None,
            **{f"{name[0].upper()}_SCALES": 0 if inv[name] is None else inv[name].size for name in SCALES},
            "PAGE_SIZE": page_size(inv),
            "PIECE": piece,
            "SINKS": 0 if sinks is None else sinks.shape[1],
            "LSE": inv.needs("lse"),
            "TOKENS": tile.tokens,
            "ROWS": tile.rows,
            "TOGETHER": tile.together,
            "SPLITS": splits,
            "ENTRIES": part_count(inv, splits),
            "PART_SIZE": inv["split_size"] or 0,
            "BLOCK": block,
            "STAGES": stages,
            "WARPS": num_warps,
        },
        num_warps=num_warps,
        num_stages=1,
        compute_capability=capability(inv),
        name="ragged_paged_attention_gluon_sm90",
        max_registers=registers(num_warps, programs) if programs > 1 else None,
    )
    return combined(inv, sums, splits)


def _described(pages: jax.Array, rows: int, columns: int) -> Any:
    """Pages, in pieces of so many tokens of one head; a page behind the last one is 0."""
    return _jax_triton.describe(pages, (1, rows, 1, columns))
