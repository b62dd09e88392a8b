"""Both launches of a call: the sums of each split, and their combination."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_ops.flash_attention.positions import NAMES
from ejkernel_triton.flash_attention._problem import operands, precision, sink_constants, width
from ejkernel_triton.flash_attention_decode import _tiling
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability

MODULE = "ejkernel_triton.flash_attention_decode._device"
#: The sums that a program combines, of all splits: 32 of each thread of four warps.
COMBINED = 4096
LEAST_COLUMNS = 32
WARP = 32


def attention(inv: Invocation, splits: int, block: int, num_warps: int, num_stages: int) -> tuple[Any, Any]:
    """The output, and the lse if it is needed."""
    positions = [inv[name] for name in NAMES]
    sums = _jax_triton.call(
        f"{MODULE}:attend",
        operands(inv, (inv["query"], inv["key"], inv["value"], *positions, inv["softmax_aux"])),
        outputs(inv, splits),
        scalars=(inv["key"].shape[1],),
        grid=(part_count(inv, splits),),
        constants={
            **constants(inv, splits),
            **sink_constants(inv),
            "WIDTH": width(inv["query"].shape[3]),
            "V_WIDTH": width(inv["value"].shape[3]),
            "POSITIONS": inv["kv_positions"] is not None,
            "PRECISION": precision(inv),
            "BLOCK": block,
        },
        num_warps=num_warps,
        num_stages=num_stages,
        compute_capability=capability(inv),
        name="flash_attention_decode",
    )
    return combined(inv, sums, splits)


def part_count(inv: Invocation, splits: int) -> int:
    """The parts of all rows of the batch, each with the keys of one key head for one tile of queries."""
    batch, _, kv_heads, _ = inv["key"].shape
    return int(batch * splits * kv_heads * _tiling.rows(inv)[1])


def constants(inv: Invocation, splits: int) -> dict[str, Any]:
    """The constants of a first launch that do not depend on how its kernel reads keys."""
    dim, group = inv["query"].shape[3], inv["query"].shape[2] // inv["key"].shape[2]
    rows, tiles = _tiling.rows(inv)
    left, right = _tiling.sides(inv)
    return {
        **_of_both_launches(inv, splits),
        "GROUP": group,
        "DIM": dim,
        "SCALE": float(inv["softmax_scale"]),
        "CAP": float(inv["logits_soft_cap"] or 0.0),
        "LEFT": left,
        "RIGHT": right,
        "STARTS": inv["q_start"] is not None,
        "LENGTHS": inv["kv_lengths"] is not None,
        "ROWS": rows,
        "TILES": tiles,
    }


def _of_both_launches(inv: Invocation, splits: int) -> dict[str, Any]:
    _, queries, heads, _ = inv["query"].shape
    v_dim = inv["value"].shape[3]
    return {"QUERIES": queries, "HEADS": heads, "V_DIM": v_dim, "LSE": inv.needs("lse"), "SPLITS": splits}


def outputs(inv: Invocation, splits: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What the first launch writes: the results and an array that is not used, or the sums of each split."""
    batch, queries, heads, _ = inv["query"].shape
    v_dim = inv["value"].shape[3]
    if splits == 1:
        return *_results(inv), jax.ShapeDtypeStruct((1,), jnp.float32)
    shape = (batch, queries, heads, splits)
    return tuple(jax.ShapeDtypeStruct((*shape, *dims), jnp.float32) for dims in ((v_dim,), (), ()))


def _results(inv: Invocation) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    query, value = inv["query"], inv["value"]
    batch, queries, heads, _ = query.shape
    return (
        jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), value.dtype),
        jax.ShapeDtypeStruct((batch, heads, queries) if inv.needs("lse") else (1,), jnp.float32),
    )


def combined(inv: Invocation, sums: Sequence[jax.Array], splits: int) -> tuple[Any, Any]:
    """The output, and the lse if it is needed, from what the first launch has written."""
    out, lse = sums[:2] if splits == 1 else _combined(inv, sums, splits)
    return out, lse if inv.needs("lse") else None


def _combined(inv: Invocation, sums: Sequence[jax.Array], splits: int) -> tuple[jax.Array, ...]:
    v_dim = inv["value"].shape[3]
    columns = min(width(v_dim), max(LEAST_COLUMNS, COMBINED // splits))
    chunks = -(-v_dim // columns)
    return _jax_triton.call(
        f"{MODULE}:combine",
        operands(inv, (*sums, inv["softmax_aux"])),
        _results(inv),
        grid=(sums[1].size // splits * chunks,),
        constants={**_of_both_launches(inv, splits), **sink_constants(inv), "COLUMNS": columns, "CHUNKS": chunks},
        num_warps=max(1, min(4, splits * columns // (WARP * WARP))),
        num_stages=1,
        compute_capability=capability(inv),
        name="flash_attention_decode_combine",
    )
