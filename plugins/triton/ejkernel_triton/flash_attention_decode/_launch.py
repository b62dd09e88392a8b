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
    query, value, sinks = inv["query"], inv["value"], inv["softmax_aux"]
    batch, queries, heads, dim = query.shape
    kv_heads, v_dim = value.shape[2:]
    rows, tiles = _tiling.rows(inv)
    left, right = _tiling.sides(inv)
    positions = [inv[name] for name in NAMES]
    shared = {"QUERIES": queries, "HEADS": heads, "V_DIM": v_dim, "LSE": inv.needs("lse"), "SPLITS": splits}
    sums = _jax_triton.call(
        f"{MODULE}:attend",
        operands(inv, (query, inv["key"], value, *positions, sinks)),
        outputs(inv, splits),
        scalars=(inv["key"].shape[1],),
        grid=(batch * splits * kv_heads * tiles,),
        constants={
            **shared,
            **sink_constants(inv),
            "GROUP": heads // kv_heads,
            "DIM": dim,
            "WIDTH": width(dim),
            "V_WIDTH": width(v_dim),
            "SCALE": float(inv["softmax_scale"]),
            "CAP": float(inv["logits_soft_cap"] or 0.0),
            "LEFT": left,
            "RIGHT": right,
            **{name: x is not None for name, x in zip(("STARTS", "LENGTHS", "POSITIONS"), positions, strict=True)},
            "PRECISION": precision(inv),
            "ROWS": rows,
            "TILES": tiles,
            "BLOCK": block,
        },
        num_warps=num_warps,
        num_stages=num_stages,
        compute_capability=capability(inv),
        name="flash_attention_decode",
    )
    return combined(inv, sums, shared)


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


def combined(inv: Invocation, sums: Sequence[jax.Array], shared: dict[str, Any]) -> tuple[Any, Any]:
    """The output, and the lse if it is needed, from what the first launch has written.

    ``shared`` are the constants that both launches have.
    """
    out, lse = sums[:2] if shared["SPLITS"] == 1 else _combined(inv, sums, shared)
    return out, lse if inv.needs("lse") else None


def _combined(inv: Invocation, sums: Sequence[jax.Array], shared: dict[str, Any]) -> tuple[jax.Array, ...]:
    splits, v_width = shared["SPLITS"], width(shared["V_DIM"])
    columns = min(v_width, max(LEAST_COLUMNS, COMBINED // splits))
    chunks = -(-shared["V_DIM"] // columns)
    return _jax_triton.call(
        f"{MODULE}:combine",
        operands(inv, (*sums, inv["softmax_aux"])),
        _results(inv),
        grid=(sums[1].size // splits * chunks,),
        constants={**shared, **sink_constants(inv), "COLUMNS": columns, "CHUNKS": chunks},
        num_warps=max(1, min(4, splits * columns // (WARP * WARP))),
        num_stages=1,
        compute_capability=capability(inv),
        name="flash_attention_decode_combine",
    )
