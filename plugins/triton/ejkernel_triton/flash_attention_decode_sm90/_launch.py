"""Both launches of a call: the sums of each split, and their combination, which is that of the portable kernel."""

from __future__ import annotations

from typing import Any

from ejkernel_core import Invocation
from ejkernel_triton.flash_attention._problem import operands
from ejkernel_triton.flash_attention_decode._launch import combined, outputs
from ejkernel_triton.flash_attention_decode._tiling import rows, sides
from ejkernel_triton.flash_attention_sm90._launch import tiled, width
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability
from ejkernel_triton.launch._multiprocessors import multiprocessors

KERNEL = "ejkernel_triton.flash_attention_decode_sm90._attend:attend"


def attention(inv: Invocation, splits: int, block: int, stages: int, num_warps: int) -> tuple[Any, Any]:
    """The output, and the lse if it is needed."""
    query, key, value, sinks = inv["query"], inv["key"], inv["value"], inv["softmax_aux"]
    batch, queries, heads, dim = query.shape
    kv_heads, v_dim = value.shape[2:]
    tile, tiles = rows(inv)
    left, right = sides(inv)
    parts = batch * splits * kv_heads * tiles
    shared = {"QUERIES": queries, "HEADS": heads, "V_DIM": v_dim, "LSE": inv.needs("lse"), "SPLITS": splits}
    arrays = (
        *(query, tiled(key, block, width(dim)), tiled(value, block, width(v_dim))),
        *(inv["q_start"], inv["kv_lengths"], sinks),
    )
    sums = _jax_triton.call(
        KERNEL,
        operands(inv, arrays),
        outputs(inv, splits),
        scalars=(key.shape[1],),
        grid=(min(parts, multiprocessors(inv)),),
        constants={
            **shared,
            "PARTS": parts,
            "GROUP": heads // kv_heads,
            "DIM": dim,
            "SCALE": float(inv["softmax_scale"]),
            "CAP": float(inv["logits_soft_cap"] or 0.0),
            "LEFT": left,
            "RIGHT": right,
            "STARTS": inv["q_start"] is not None,
            "LENGTHS": inv["kv_lengths"] is not None,
            "SINKS": 0 if sinks is None else sinks.shape[1],
            "ROWS": tile,
            "TILES": tiles,
            "BLOCK": block,
            "STAGES": stages,
            "WARPS": num_warps,
        },
        num_warps=num_warps,
        num_stages=1,
        compute_capability=capability(inv),
        name="flash_attention_decode_gluon_sm90",
    )
    return combined(inv, sums, shared)
