"""Launches of the kernels, of ``rms_norm`` and, where rows are centered, of ``layer_norm``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_ops.rms_norm.axes import FORMATS
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability, multiprocessors
from ejkernel_triton.norms import BackwardConfig, Config
from ejkernel_triton.norms._tiling import THREADS, count_rows, is_centered, padded, pieces, width

Results = tuple[jax.Array, ...]
#: An output that a call does not have.
ABSENT = jax.ShapeDtypeStruct((1,), jnp.float32)
#: What second derivatives bring.
STATISTICS = ("d_mean", "d_rstd")
#: Of ``differentiate_columns``: its warps, the entries of a tile, 16 a thread, and its programs on a multiprocessor.
COLUMN_WARPS, COLUMN_ENTRIES, COLUMN_PROGRAMS = 8, 16 * THREADS * 8, 4


def forward(inv: Invocation, cfg: Config) -> tuple[jax.Array | None, ...]:
    """The result, the sum and, if they are needed, the statistics of the rows, as the operation declares them."""
    x, residual, centered = inv["x"], inv["residual"], is_centered(inv)
    statistic = jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)
    has_statistics = inv.needs("rstd") or (centered and inv.needs("mean"))
    statistics = (statistic if centered and has_statistics else None, statistic if has_statistics else None)
    outputs = (_like(x), _like(residual), *map(_like, statistics))
    if x.size == 0:
        out, total, mean, rstd = (jnp.zeros(output.shape, output.dtype) for output in outputs)
    else:
        tiles = blocks(count_rows(inv), cfg.rows)
        grid = min(tiles, cfg.programs * multiprocessors(inv)) if cfg.programs and not cfg.block else tiles
        out, total, mean, rstd = _launch(
            "_forward:normalize_long" if cfg.block else "_forward:normalize",
            inv,
            cfg,
            ("x", "residual", "weight", "bias"),
            outputs,
            (grid,),
            {
                **_forward_constants(inv, cfg),
                "STATISTICS": has_statistics,
                **({"WIDTH": cfg.block} if cfg.block else _whole_rows(inv, cfg)),
            },
        )
    total = x if residual is None else total
    results = (out, total, mean, rstd) if centered else (out, total, rstd)
    return results if has_statistics else (out, total, *(None for _ in results[2:]))


def quantized(inv: Invocation, cfg: Config) -> Results:
    """The values, their scales, and the sum."""
    x, residual = inv["x"], inv["residual"]
    dtype, largest, block = FORMATS[inv["quantize"]]
    count = 1 if block is None else blocks(x.shape[-1], block)
    outputs = (
        jax.ShapeDtypeStruct(x.shape, dtype),
        jax.ShapeDtypeStruct((*x.shape[:-1], count), jnp.float32),
        _like(residual),
    )
    if x.size == 0:
        values, scales, total = (jnp.zeros(output.shape, output.dtype) for output in outputs)
    else:
        values, scales, total = _launch(
            "_quantized:quantize_long" if cfg.block else "_quantized:quantize",
            inv,
            cfg,
            ("x", "residual", "weight", "bias"),
            outputs,
            (blocks(count_rows(inv), cfg.rows),),
            {
                **_forward_constants(inv, cfg),
                "WIDTH": cfg.block or width(inv),
                "BLOCK": block or 0,
                "LARGEST": largest,
            },
        )
    return values, scales, x if residual is None else total


def gradients(inv: Invocation, cfg: BackwardConfig) -> Results:
    """The gradients that ``wrt`` names, in its order."""
    wrt = inv["wrt"]
    has_statistics = any(inv.get(name) is not None for name in STATISTICS)
    if inv["x"].size == 0 or (inv["d_out"] is None and not has_statistics):
        rows = jnp.zeros((), jnp.float32) if inv["d_sum"] is None else inv["d_sum"]
        by_name = {name: rows if name in ("x", "residual") else jnp.zeros(()) for name in wrt}
        return tuple(jnp.broadcast_to(by_name[name], inv[name].shape).astype(inv[name].dtype) for name in wrt)
    if inv["d_out"] is None:
        inv = inv.with_arrays({"d_out": jnp.zeros(inv["x"].shape, inv["x"].dtype)})
    sums = [name for name in ("weight", "bias") if name in wrt]
    has_rows = "x" in wrt or "residual" in wrt
    by_name = _of_columns(inv, cfg, sums) if cfg.columns or not has_rows else _of_rows(inv, cfg, sums)
    return tuple(by_name[name] for name in wrt)


def _of_rows(inv: Invocation, cfg: BackwardConfig, sums: list[str]) -> dict[str, jax.Array]:
    """All gradients, by programs that have whole rows."""
    tiles = blocks(count_rows(inv), cfg.rows)
    return _gradients(
        "_backward:differentiate_wide" if cfg.block else "_backward:differentiate",
        inv,
        cfg,
        ("sum", "d_out", "d_sum", *STATISTICS, "weight", "mean", "rstd"),
        (min(tiles, cfg.programs * multiprocessors(inv)),),
        {
            **_presence(inv, ("d_sum", *STATISTICS)),
            **_weight(inv),
            "CENTERED": is_centered(inv),
            "DIM": inv["x"].shape[-1],
            "ROWS": cfg.rows,
            "WIDTH": width(inv),
            **({"BLOCK": cfg.block} if cfg.block else {}),
        },
        sums,
    )


def _of_columns(inv: Invocation, cfg: BackwardConfig, sums: list[str]) -> dict[str, jax.Array]:
    """All gradients, by programs that have some columns of many rows, after others have reduced each row."""
    dim, columns = inv["x"].shape[-1], min(cfg.columns or 256, padded(inv["x"].shape[-1]))
    has_rows = "x" in inv["wrt"] or "residual" in inv["wrt"]
    weight = _weight(inv) if has_rows else {"WEIGHT": False, "OFFSET": 0.0}
    if has_rows:
        of_rows = jax.ShapeDtypeStruct(inv["x"].shape[:-1], jnp.float32)
        unit_factors, constants = _launch(
            "_backward:reduce_rows",
            inv,
            cfg,
            ("sum", "d_out", *STATISTICS, "weight", "mean", "rstd"),
            (of_rows, of_rows if is_centered(inv) else ABSENT),
            (blocks(count_rows(inv), cfg.rows),),
            {
                **_presence(inv, STATISTICS),
                **weight,
                "CENTERED": is_centered(inv),
                "DIM": dim,
                "ROWS": cfg.rows,
                "WIDTH": cfg.block,
            },
        )
        inv = inv.with_arrays({"unit_factors": unit_factors, "constants": constants})
    tile = COLUMN_ENTRIES // columns
    groups = blocks(dim, columns)
    count = min(blocks(count_rows(inv), tile), max(1, COLUMN_PROGRAMS * multiprocessors(inv) // groups))
    return _gradients(
        "_backward:differentiate_columns",
        inv,
        cfg,
        ("sum", "d_out", "d_sum", "weight", "mean", "rstd", "unit_factors", "constants"),
        (groups, count),
        {
            **_presence(inv, ("d_sum",)),
            **weight,
            "D_ROWS": has_rows,
            "CENTERED": is_centered(inv),
            "DIM": dim,
            "ROWS": tile,
            "WIDTH": columns,
        },
        sums,
        num_warps=COLUMN_WARPS,
    )


def _gradients(
    kernel: str,
    inv: Invocation,
    cfg: BackwardConfig,
    arrays: Iterable[str],
    grid: tuple[int, ...],
    constants: Mapping[str, Any],
    sums: list[str],
    num_warps: int | None = None,
) -> dict[str, jax.Array]:
    """The gradients of x and the residual, which are the same numbers, and those of ``sums``, in one launch.

    The last number of the grid is that of the partial sums.
    """
    names = [name for name in ("x", "residual") if name in inv["wrt"]]
    dtypes = list(dict.fromkeys(inv[name].dtype for name in names))
    outputs = [jax.ShapeDtypeStruct(inv["x"].shape, dtype) for dtype in dtypes]
    parts = jax.ShapeDtypeStruct((grid[-1], inv["x"].shape[-1]), jnp.float32)
    outputs += [ABSENT] * (2 - len(outputs)) + [parts if name in sums else ABSENT for name in ("weight", "bias")]
    has_sums = {f"D_{name.upper()}": name in sums for name in ("weight", "bias")}
    constants = {**constants, "SECOND_DTYPE": len(dtypes) == 2, **has_sums}
    *by_dtype, d_weight, d_bias = _launch(kernel, inv, cfg, arrays, outputs, grid, constants, num_warps)
    of_rows = dict(zip(dtypes, by_dtype, strict=False))
    partial_sums = {"weight": d_weight, "bias": d_bias}
    return {
        **{name: of_rows[inv[name].dtype] for name in names},
        **{name: partial_sums[name].sum(0).astype(inv[name].dtype) for name in sums},
    }


# -- what all of them have in common ---------------------------------------------------------------------------------


def _launch(
    kernel: str,
    inv: Invocation,
    cfg: Config | BackwardConfig,
    arrays: Iterable[str],
    outputs: Iterable[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    constants: Mapping[str, Any],
    num_warps: int | None = None,
) -> Results:
    # A kernel does not read what a call does not have: any array will do in its place.
    operands = [inv.get(name) for name in arrays]
    return _jax_triton.call(
        f"ejkernel_triton.norms.{kernel}",
        [operands[0] if array is None else array for array in operands],
        tuple(outputs),
        scalars=(count_rows(inv),),
        grid=grid,
        constants=constants,
        num_warps=num_warps or cfg.num_warps,
        num_stages=1,
        compute_capability=capability(inv),
        name=f"{inv.op}_{kernel.partition(':')[2]}",
    )


def _forward_constants(inv: Invocation, cfg: Config) -> dict[str, Any]:
    return {
        "RESIDUAL": inv["residual"] is not None,
        **_weight(inv),
        "BIAS": inv["bias"] is not None,
        "CENTERED": is_centered(inv),
        "EPSILON": float(inv["epsilon"]),
        "DIM": inv["x"].shape[-1],
        "ROWS": cfg.rows,
    }


def _whole_rows(inv: Invocation, cfg: Config) -> dict[str, Any]:
    head, tail = pieces(inv["x"].shape[-1])
    return {"WIDTH": head, "TAIL": tail, "PERSISTENT": bool(cfg.programs)}


def _presence(inv: Invocation, names: Iterable[str]) -> dict[str, bool]:
    """Whether the call has each of these arrays."""
    return {name.upper(): inv.get(name) is not None for name in names}


def _weight(inv: Invocation) -> dict[str, Any]:
    return {"WEIGHT": inv["weight"] is not None, "OFFSET": float(inv["weight_offset"])}


def _like(array: Any) -> jax.ShapeDtypeStruct:
    return ABSENT if array is None else jax.ShapeDtypeStruct(array.shape, array.dtype)


def blocks(length: int, block: int) -> int:
    """How many blocks there are."""
    return math.ceil(length / block)
