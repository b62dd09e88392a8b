"""Launches of the kernels."""

from __future__ import annotations

import math
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_ops.grouped_matmul.axes import AXES, D_RHS_AXES
from ejkernel_ops.grouped_matmul.groups import boundaries
from ejkernel_triton.grouped_matmul._tiling import PRECISIONS, Config
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability


@attrs.frozen(eq=False)
class Tokens:
    """Tokens that are rows ``k`` times each, in this order."""

    x: jax.Array
    order: jax.Array
    k: int


def forward(inv: Invocation, cfg: Config, tokens: Tokens | None = None) -> jax.Array:
    """The result, with zeros in rows of no group. With ``tokens``, ``lhs`` is only the shape of their rows."""
    (output,) = AXES.outputs(inv)
    if 0 in output.shape:
        return jnp.zeros(output.shape, output.dtype)
    lhs, rhs, bias = inv["lhs"], inv["rhs"], inv["rhs_bias"]
    rows, groups = lhs.shape[0], rhs.shape[0]
    starts_and_end = boundaries(inv)
    row_tiles = math.ceil(rows / cfg.rows) + groups + 1
    return _launch(
        "multiply",
        inv,
        cfg,
        [
            lhs if tokens is None else tokens.x,
            rhs,
            starts_and_end,
            rhs if bias is None else bias,
            starts_and_end if tokens is None else tokens.order,
        ],
        output,
        (row_tiles * math.ceil(output.shape[1] / cfg.columns),),
        {
            "K": lhs.shape[1],
            "N": rhs.shape[1 if inv["transpose_rhs"] else 2],
            "GROUPS": groups,
            "PARTS": 1 << (groups + 1).bit_length(),
            "TRANSPOSED": inv["transpose_rhs"],
            "BIAS": bias is not None,
            "ACTIVATION": inv["activation"],
            "CHOSEN": None if tokens is None else tokens.k,
        },
        (rows,),
    )


def d_rhs(inv: Invocation, cfg: Config) -> jax.Array:
    """The gradient of ``rhs``."""
    (output,) = D_RHS_AXES.outputs(inv)
    if 0 in output.shape:
        return jnp.zeros(output.shape, output.dtype)
    groups, k, n = output.shape
    first, second = (inv["d_out"], inv["lhs"]) if inv["transpose_rhs"] else (inv["lhs"], inv["d_out"])
    return _launch(
        "contract",
        inv,
        cfg,
        [first, second, inv["boundaries"]],
        output,
        (math.ceil(k / cfg.rows) * math.ceil(n / cfg.columns), groups),
        {"K": k, "N": n},
    )


def _launch(
    kernel: str,
    inv: Invocation,
    cfg: Config,
    arrays: list[Any],
    output: jax.ShapeDtypeStruct,
    grid: tuple[int, ...],
    constants: dict[str, Any],
    scalars: tuple[int, ...] = (),
) -> jax.Array:
    tile = {"ROWS": cfg.rows, "COLUMNS": cfg.columns, "DEPTH": cfg.depth, "BAND": cfg.band}
    (result,) = _jax_triton.call(
        f"ejkernel_triton.grouped_matmul._kernels:{kernel}",
        arrays,
        (output,),
        scalars=scalars,
        grid=grid,
        constants={**constants, "PRECISION": PRECISIONS[inv["precision"]], **tile},
        num_warps=cfg.num_warps,
        num_stages=cfg.num_stages,
        compute_capability=capability(inv),
        name=f"{inv.op}_{kernel}",
    )
    return result
