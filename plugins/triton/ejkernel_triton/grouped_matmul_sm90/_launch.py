"""Launches of the kernels."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_ops.grouped_matmul.axes import AXES, D_RHS_AXES
from ejkernel_ops.grouped_matmul.groups import boundaries
from ejkernel_triton.grouped_matmul_sm90._tiling import DEPTH, GATES, HALF, ROWS, Config
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability, multiprocessors

#: The columns of a matrix that it fetches at a time: those of a tile, or half of them.
BOX = 128
#: At most how many tiles, and how many groups, a program lists.
TILES, GROUPS = 64, 32
#: How many pairs of a tile and a group a program compares at most: more do not fit into registers.
PAIRS = 64 * 128
#: Of the tiles that programs take after the first one of each. It is 0 when a kernel starts.
COUNTER = jax.ShapeDtypeStruct((1,), jnp.int32)


def forward(inv: Invocation, cfg: Config) -> jax.Array:
    """The result, with zeros in rows of no group."""
    (output,) = AXES.outputs(inv)
    lhs, rhs, bias, transposed = inv["lhs"], inv["rhs"], inv["rhs_bias"], inv["transpose_rhs"]
    block = (1, BOX, DEPTH) if transposed else (1, DEPTH, BOX)
    table = row_table(inv)
    return _launch(
        "_multiply:multiply",
        inv,
        [
            _jax_triton.describe(lhs, (HALF, DEPTH)),
            _jax_triton.describe(rhs, block),
            table,
            lhs if bias is None else bias,
        ],
        (output,),
        multiprocessors(inv),
        {
            "K": lhs.shape[1],
            "N": rhs.shape[1 if transposed else 2],
            "COLUMNS": cfg.columns,
            "TRANSPOSED": transposed,
            "BIAS": bias is not None,
            "ACTIVATION": inv["activation"],
            "GATES": GATES.get(inv["activation"]),
            "STAGES": cfg.stages,
            "BAND": cfg.band,
        },
    )


def row_table(inv: Invocation) -> jax.Array:
    """The tiles of rows, as `_tables.list_rows` has them."""
    rows, groups = inv["lhs"].shape[0], inv["rhs"].shape[0]
    # Each group, and the rows before the first and after the last one, may end with a tile that is not full.
    most = math.ceil(rows / ROWS) + groups + 1
    parts = 1 << (groups + 1).bit_length()
    tiles = max(1, min(TILES, PAIRS // parts))
    programs = math.ceil(most / tiles)
    return _launch(
        "_tables:list_rows",
        inv,
        [boundaries(inv)],
        (jax.ShapeDtypeStruct((4 * (1 + programs * tiles),), jnp.int32),),
        programs,
        {"GROUPS": groups, "PARTS": parts, "ROWS": ROWS, "TILES": tiles},
        (rows,),
    )


def d_rhs(inv: Invocation, cfg: Config) -> jax.Array:
    """The gradient of ``rhs``."""
    (output,) = D_RHS_AXES.outputs(inv)
    groups, k, n = output.shape
    first, second = (inv["d_out"], inv["lhs"]) if inv["transpose_rhs"] else (inv["lhs"], inv["d_out"])
    return _launch(
        "_contract:contract",
        inv,
        [
            _jax_triton.describe(first, (DEPTH, HALF)),
            _jax_triton.describe(second, (DEPTH, BOX)),
            group_table(inv, cfg),
        ],
        (output, COUNTER),
        multiprocessors(inv),
        {"GROUPS": groups, "K": k, "N": n, "COLUMNS": cfg.columns, "STAGES": cfg.stages, "BAND": cfg.band},
    )


def group_table(inv: Invocation, cfg: Config) -> jax.Array:
    """The groups in the order of `_tables.list_groups`."""
    ((groups, k, n),) = (output.shape for output in D_RHS_AXES.outputs(inv))
    rows = inv["lhs"].shape[0]
    # If one group has so many rows that the others are done before it, more programs share its matrix, in narrow tiles.
    tiles = math.ceil(k / ROWS) * math.ceil(n / cfg.columns)
    most = rows if tiles >= multiprocessors(inv) else rows * tiles // (2 * multiprocessors(inv))
    return _launch(
        "_tables:list_groups",
        inv,
        [inv["boundaries"]],
        (jax.ShapeDtypeStruct((1 + 3 * groups,), jnp.int32),),
        math.ceil(groups / GROUPS),
        {"GROUPS": groups, "PARTS": 1 << max(groups - 1, 1).bit_length(), "BLOCK": GROUPS},
        (most,),
    )


def _launch(
    kernel: str,
    inv: Invocation,
    arrays: list[Any],
    outputs: tuple[jax.ShapeDtypeStruct, ...],
    programs: int,
    constants: dict[str, Any],
    scalars: tuple[int, ...] = (),
) -> jax.Array:
    result, *_ = _jax_triton.call(
        f"ejkernel_triton.grouped_matmul_sm90.{kernel}",
        arrays,
        outputs,
        scalars=scalars,
        grid=(programs,),
        constants=constants,
        num_warps=4,
        num_stages=1,
        compute_capability=capability(inv),
        name=f"{inv.op}_{kernel.partition(':')[2]}_sm90",
        zeroed_outputs=range(1, len(outputs)),
    )
    return result
