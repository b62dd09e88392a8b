"""Both launches of a call: the sums of each split, and their combination."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_ops.pages import pages_of
from ejkernel_ops.ragged_paged_attention.definition import kv_heads, most_keys, output_dtype, page_size, value_dim
from ejkernel_ops.ragged_paged_attention.tiles import tiles
from ejkernel_triton.flash_attention._problem import operands, precision, sink_constants, width
from ejkernel_triton.flash_attention_decode._launch import COMBINED, LEAST_COLUMNS, WARP
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability
from ejkernel_triton.ragged_paged_attention import _tiling

MODULE = "ejkernel_triton.ragged_paged_attention._device"
SCALES = ("q_scale", "k_scale", "v_scale")
#: The columns and warps of a program that combines parts of a fixed size: one part after another.
FIXED_COLUMNS, FIXED_WARPS = 128, 1


def attention(inv: Invocation, splits: int, block: int, num_warps: int, num_stages: int) -> tuple[Any, Any]:
    """The output, and the lse if it is needed."""
    size, heads, rows = _tiling.tile(inv)
    work = tiles(inv, size).reshape(-1)
    lists = ("block_tables", "kv_lens", "query_start_loc", "num_seqs", "first_page")
    arrays = [inv["query"], *_keys_and_values(inv), *(inv[name] for name in lists), work]
    sums = _jax_triton.call(
        f"{MODULE}:attend",
        operands(inv, [*arrays, *(inv[name] for name in SCALES), inv["softmax_aux"]]),
        outputs(inv, splits),
        scalars=(*_sizes(inv), inv["block_tables"].shape[1], pages_of(inv)[0].shape[0], work.size // 2),
        grid=(_tiling.program_count(inv) * splits,),
        constants={
            **_of_both_launches(inv, splits),
            **_strides(inv),
            "GROUP": _tiling.group(inv),
            "DIM": inv["query"].shape[2],
            "WIDTH": width(inv["query"].shape[2]),
            "V_WIDTH": width(value_dim(inv)),
            "PAGE_SIZE": page_size(inv),
            "FIRST_PAGE": inv["first_page"] is not None,
            "SCALE": float(inv["softmax_scale"]),
            "CAP": float(inv["logits_soft_cap"] or 0.0),
            **{f"{name[0].upper()}_SCALES": 0 if inv[name] is None else inv[name].size for name in SCALES},
            "PRECISION": precision(inv),
            "TILE_HEADS": heads,
            "ROWS": rows,
            "SPLITS": splits,
            "BLOCK": block,
        },
        num_warps=num_warps,
        num_stages=num_stages,
        compute_capability=capability(inv),
        name=inv.op,
    )
    return combined(inv, sums, splits)


def combined(inv: Invocation, sums: Sequence[jax.Array], splits: int) -> tuple[Any, Any]:
    """The output, and the lse if it is needed, from what the first launch has written."""
    out, lse = sums[:2] if splits == 1 else _combined(inv, sums, tiles(inv, _tiling.tile(inv)[0]).reshape(-1), splits)
    return out, lse if inv.needs("lse") else None


def _keys_and_values(inv: Invocation) -> list[Any]:
    pages = pages_of(inv)
    return pages if len(pages) == 2 else pages * 2


def _strides(inv: Invocation) -> dict[str, int]:
    """From a slot to the next one, and from a head to the next one; where values begin."""
    heads, dim, v_dim = kv_heads(inv), int(inv["query"].shape[2]), value_dim(inv)
    if inv["kv_pages"] is None:
        steps = {"KEY_STEP": dim, "VALUE_STEP": v_dim, "VALUES": 0}
        return {"KEY_STRIDE": heads * dim, "VALUE_STRIDE": heads * v_dim, **steps}
    steps = {"KEY_STEP": 2 * dim, "VALUE_STEP": 2 * dim, "VALUES": dim}
    return {"KEY_STRIDE": 2 * heads * dim, "VALUE_STRIDE": 2 * heads * dim, **steps}


def _sizes(inv: Invocation) -> tuple[int, int]:
    return inv["query"].shape[0], inv["kv_lens"].shape[0]


def _of_both_launches(inv: Invocation, splits: int) -> dict[str, Any]:
    left, right = _tiling.sides(inv)
    return {
        **sink_constants(inv),
        "HEADS": inv["query"].shape[1],
        "V_DIM": value_dim(inv),
        "LEFT": left,
        "RIGHT": right,
        "NUM_SEQS": inv["num_seqs"] is not None,
        "LSE": inv.needs("lse"),
        "TILE": _tiling.tile(inv)[0],
        "PART_SIZE": inv["split_size"] or 0,
        "PARTS": _tiling.part_count(inv, splits),
    }


def outputs(inv: Invocation, splits: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What the first launch writes: the results and an array that is not used, or the sums of each part."""
    if splits == 1:
        return *_results(inv), jax.ShapeDtypeStruct((1,), jnp.float32)
    shape = (*inv["query"].shape[:2], _tiling.part_count(inv, splits))
    return tuple(jax.ShapeDtypeStruct((*shape, *dims), jnp.float32) for dims in ((value_dim(inv),), (), ()))


def _results(inv: Invocation) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    tokens, heads, _ = inv["query"].shape
    return (
        jax.ShapeDtypeStruct((tokens, heads, value_dim(inv)), output_dtype(inv)),
        jax.ShapeDtypeStruct((heads, tokens) if inv.needs("lse") else (1,), jnp.float32),
    )


def _combined(inv: Invocation, sums: Sequence[jax.Array], work: jax.Array, splits: int) -> tuple[jax.Array, ...]:
    columns, num_warps = min(width(value_dim(inv)), FIXED_COLUMNS), FIXED_WARPS
    if inv["split_size"] is None:
        columns = min(width(value_dim(inv)), max(LEAST_COLUMNS, COMBINED // splits))
        num_warps = max(1, min(4, splits * columns // (WARP * WARP)))
    chunks = -(-value_dim(inv) // columns)
    lists = [inv["kv_lens"], inv["query_start_loc"], inv["num_seqs"], work]
    return _jax_triton.call(
        f"{MODULE}:combine",
        operands(inv, [*sums, *lists, inv["softmax_aux"]]),
        _results(inv),
        scalars=(*_sizes(inv), most_keys(inv), work.size // 2),
        grid=(work.size // 2 * _tiling.tile(inv)[0] * inv["query"].shape[1] * chunks,),
        constants={**_of_both_launches(inv, splits), "COLUMNS": columns, "CHUNKS": chunks},
        num_warps=num_warps,
        num_stages=1,
        compute_capability=capability(inv),
        name=f"{inv.op}_combine",
    )
