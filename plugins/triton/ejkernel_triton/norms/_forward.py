"""The forward kernels: rows that are held in registers, and long rows, which are read twice.

The second reading finds a long row in the L2 cache. With 8-bit results the scale of a whole row needs a third one.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel_triton.norms._tile import (
    apply_weight,
    load_columns,
    load_total,
    normalized_rows,
    statistics_of_long_rows,
    store_tile,
)


@triton.jit
def normalize(
    x, residual, weight, bias, rows,
    out, total, mean, rstd,
    RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, OFFSET: tl.constexpr, CENTERED: tl.constexpr,
    STATISTICS: tl.constexpr, EPSILON: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    TAIL: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """Rows that are held in registers: one tile a program, or with ``PERSISTENT`` many, one after the other."""
    w, b = load_columns(weight, 0, WEIGHT, DIM, WIDTH), load_columns(bias, 0, BIAS, DIM, WIDTH)
    w_tail, b_tail = w, b
    if TAIL > 0:
        w_tail, b_tail = load_columns(weight, WIDTH, WEIGHT, DIM, TAIL), load_columns(bias, WIDTH, BIAS, DIM, TAIL)
    if PERSISTENT:
        for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
            _normalize_tile(
                x, residual, w, b, w_tail, b_tail, first, rows, out, total, mean, rstd, RESIDUAL, WEIGHT, BIAS, OFFSET,
                CENTERED, STATISTICS, EPSILON, DIM, ROWS, WIDTH, TAIL,
            )  # fmt: skip
    else:
        _normalize_tile(
            x, residual, w, b, w_tail, b_tail, tl.program_id(0) * ROWS, rows, out, total, mean, rstd, RESIDUAL, WEIGHT,
            BIAS, OFFSET, CENTERED, STATISTICS, EPSILON, DIM, ROWS, WIDTH, TAIL,
        )  # fmt: skip


@triton.jit
def _normalize_tile(
    x, residual, w, b, w_tail, b_tail, first, rows, out, total, mean, rstd,
    RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, OFFSET: tl.constexpr, CENTERED: tl.constexpr,
    STATISTICS: tl.constexpr, EPSILON: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    head, tail = normalized_rows(
        x, residual, total, mean, rstd, first, rows, RESIDUAL, STATISTICS, CENTERED, EPSILON, DIM, ROWS, WIDTH, TAIL
    )
    out += first.to(tl.int64) * DIM
    store_tile(out, 0, rows - first, apply_weight(head, w, b, WEIGHT, BIAS, OFFSET), DIM, ROWS, WIDTH)
    if TAIL > 0:
        store_tile(out, WIDTH, rows - first, apply_weight(tail, w_tail, b_tail, WEIGHT, BIAS, OFFSET), DIM, ROWS, TAIL)


@triton.jit
def normalize_long(
    x, residual, weight, bias, rows,
    out, total, mean, rstd,
    RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, OFFSET: tl.constexpr, CENTERED: tl.constexpr,
    STATISTICS: tl.constexpr, EPSILON: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows that are read twice, tile by tile."""
    first = tl.program_id(0) * ROWS
    base = first.to(tl.int64) * DIM
    x, residual, out, total = x + base, residual + base, out + base, total + base
    rows_left = rows - first
    means, rstds = statistics_of_long_rows(
        x, residual, total, rows_left, RESIDUAL, CENTERED, EPSILON, DIM, ROWS, WIDTH
    )  # fmt: skip
    row = tl.arange(0, ROWS)
    if STATISTICS:
        if CENTERED:
            tl.store(mean + first + row, means, mask=row < rows_left)
        tl.store(rstd + first + row, rstds, mask=row < rows_left)
    for start in range(0, DIM, WIDTH):
        tile = _weighted_tile(
            x, residual, weight, bias, means, rstds, start, rows_left, RESIDUAL, WEIGHT, BIAS, OFFSET, DIM, ROWS, WIDTH,
            "evict_first",
        )  # fmt: skip
        store_tile(out, start, rows_left, tile, DIM, ROWS, WIDTH)


@triton.jit
def _weighted_tile(
    x, residual, weight, bias, means, rstds, start, rows,
    RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, OFFSET: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    """A tile of long rows, normalized and weighted. Entries outside the array are not 0."""
    tile = load_total(x, residual, start, rows, RESIDUAL, DIM, ROWS, WIDTH, EVICTION)
    tile = (tile - means[:, None]) * rstds[:, None]
    w, b = load_columns(weight, start, WEIGHT, DIM, WIDTH), load_columns(bias, start, BIAS, DIM, WIDTH)
    return apply_weight(tile, w, b, WEIGHT, BIAS, OFFSET)
