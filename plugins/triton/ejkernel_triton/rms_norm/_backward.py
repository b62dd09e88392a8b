"""The backward kernels: gradients of rows, and partial sums of the gradients of weight and bias, which XLA adds up.

With ``unit``, the normalized row before the weight, and ``d_unit``, its gradient, the gradient of a row is
``(d_unit - unit * mean(d_unit * unit)) * rstd + d_sum``. Where the mean of a row is subtracted, so is ``mean(d_unit)``.
The gradient of the weight is the sum of ``d_out * unit`` over all rows, that of the bias the sum of ``d_out``.

Sums have a fixed order, so the bits are the same every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel_triton.rms_norm._tile import load_columns, load_tile, store_tile


@triton.jit
def differentiate(
    total, d_out, d_sum, d_mean, d_rstd, weight, mean, rstd, rows,
    d_rows, d_rows_2, d_weight, d_bias,
    D_SUM: tl.constexpr, D_MEAN: tl.constexpr, D_RSTD: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr,
    CENTERED: tl.constexpr, SECOND_DTYPE: tl.constexpr, D_WEIGHT: tl.constexpr, D_BIAS: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows that are held in registers, tile after tile. A program also holds the sums over its rows in registers. It
    fetches the next tile before it computes the current one.

    With ``SECOND_DTYPE``, ``d_rows_2`` gets the numbers of ``d_rows`` in another dtype.
    """
    w = load_columns(weight, 0, WEIGHT, DIM, WIDTH)
    # Sums that are not needed stay 0, and the compiler removes them.
    weight_sums, bias_sums = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    part, step = tl.program_id(0), tl.num_programs(0) * ROWS
    x, d, means, rstds = _load_rows(total, d_out, mean, rstd, part * ROWS, rows, CENTERED, DIM, ROWS, WIDTH)
    for first in range(part * ROWS, rows, step):
        unit, d_unit, own_rstds = (x.to(tl.float32) - means[:, None]) * rstds[:, None], d.to(tl.float32), rstds
        x, d, means, rstds = _load_rows(total, d_out, mean, rstd, first + step, rows, CENTERED, DIM, ROWS, WIDTH)
        if D_WEIGHT:
            weight_sums += d_unit * unit
        if D_BIAS:
            bias_sums += d_unit
        if WEIGHT:
            d_unit *= w.to(tl.float32) + OFFSET
        unit_factor, constant = tl.sum(d_unit * unit, 1), tl.zeros([ROWS], tl.float32)
        if CENTERED:
            constant = tl.sum(d_unit, 1)
        unit_factor, constant = _statistics_terms(
            unit_factor, constant, d_mean, d_rstd, own_rstds, first, rows, D_MEAN, D_RSTD, DIM, ROWS
        )
        _store_gradient(
            d_rows, d_rows_2, d_sum, unit, d_unit, unit_factor, constant, own_rstds, first, 0, rows, D_SUM,
            SECOND_DTYPE, DIM, ROWS, WIDTH,
        )  # fmt: skip
    if D_WEIGHT:
        _store_sums(d_weight, weight_sums, part, 0, DIM, WIDTH)
    if D_BIAS:
        _store_sums(d_bias, bias_sums, part, 0, DIM, WIDTH)


@triton.jit
def _load_rows(total, d_out, mean, rstd, first, rows, CENTERED: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
               WIDTH: tl.constexpr):  # fmt: skip
    """The entries and the statistics of the rows from ``first``, in the dtypes of the arrays; 0 after the last row."""
    base = first.to(tl.int64) * DIM
    rows_left = rows - first
    x = load_tile(total + base, 0, rows_left, DIM, ROWS, WIDTH, "evict_first")
    d = load_tile(d_out + base, 0, rows_left, DIM, ROWS, WIDTH, "evict_first")
    means, rstds = _load_statistics(mean, rstd, first, rows_left, CENTERED, ROWS)
    return x, d, means, rstds


@triton.jit
def _load_statistics(mean, rstd, first, rows, CENTERED: tl.constexpr, ROWS: tl.constexpr):
    """The mean, 0 unless it is subtracted, and the reciprocal root mean square of ``rows`` rows; 0 after these rows."""
    row = tl.arange(0, ROWS)
    means = tl.zeros([ROWS], tl.float32)
    if CENTERED:
        means = tl.load(mean + first + row, mask=row < rows, other=0.0)
    return means, tl.load(rstd + first + row, mask=row < rows, other=0.0)


@triton.jit
def _statistics_terms(unit_factor, constant, d_mean, d_rstd, rstds, first, rows, D_MEAN: tl.constexpr,
                        D_RSTD: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """The terms that are subtracted from the gradient of each row because the statistics depend on the row: the factor
    of ``unit``, before the product with ``rstd``, and a constant, after it. The arguments ``unit_factor`` and
    ``constant`` are the sums of ``d_unit * unit`` and of ``d_unit``.

    Only second derivatives have gradients of the statistics themselves (``D_MEAN``, ``D_RSTD``).
    """
    row = tl.arange(0, ROWS)
    is_inside = row < rows - first
    constant *= rstds
    if D_RSTD:
        unit_factor += tl.load(d_rstd + first + row, mask=is_inside, other=0.0) * rstds
    if D_MEAN:
        constant -= tl.load(d_mean + first + row, mask=is_inside, other=0.0)
    return unit_factor * (1.0 / DIM), constant * (1.0 / DIM)


@triton.jit
def _store_gradient(
    d_rows, d_rows_2, d_sum, unit, d_unit, unit_factor, constant, rstds, first, start, rows,
    D_SUM: tl.constexpr, SECOND_DTYPE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store the gradient of a tile of rows, from the terms of `_statistics_terms`."""
    base = first.to(tl.int64) * DIM
    rows_left = rows - first
    gradient = (d_unit - unit * unit_factor[:, None]) * rstds[:, None] - constant[:, None]
    if D_SUM:
        gradient += load_tile(d_sum + base, start, rows_left, DIM, ROWS, WIDTH, "evict_first").to(tl.float32)
    store_tile(d_rows + base, start, rows_left, gradient, DIM, ROWS, WIDTH)
    if SECOND_DTYPE:
        store_tile(d_rows_2 + base, start, rows_left, gradient, DIM, ROWS, WIDTH)


@triton.jit
def _store_sums(sums, tile, part, start, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Store the sum over the rows of a tile as columns of the row ``part`` of the partial sums."""
    column = start + tl.arange(0, WIDTH)
    tl.store(sums + part.to(tl.int64) * DIM + column, tl.sum(tile, 0), mask=column < DIM)


@triton.jit
def differentiate_long(
    total, d_out, d_sum, d_mean, d_rstd, weight, mean, rstd, rows,
    d_rows, d_rows_2,
    D_SUM: tl.constexpr, D_MEAN: tl.constexpr, D_RSTD: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr,
    CENTERED: tl.constexpr, SECOND_DTYPE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows that are read twice, tile by tile."""
    first = tl.program_id(0) * ROWS
    rows_left = rows - first
    means, rstds = _load_statistics(mean, rstd, first, rows_left, CENTERED, ROWS)
    products, sums = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, DIM, WIDTH):
        unit, d_unit = _unit_and_gradient(
            total, d_out, weight, means, rstds, first, start, rows, WEIGHT, OFFSET, DIM, ROWS, WIDTH, "evict_last"
        )
        products += d_unit * unit
        if CENTERED:
            sums += d_unit
    unit_factor, constant = _statistics_terms(
        tl.sum(products, 1), tl.sum(sums, 1), d_mean, d_rstd, rstds, first, rows, D_MEAN, D_RSTD, DIM, ROWS
    )
    for start in range(0, DIM, WIDTH):
        unit, d_unit = _unit_and_gradient(
            total, d_out, weight, means, rstds, first, start, rows, WEIGHT, OFFSET, DIM, ROWS, WIDTH, "evict_first"
        )
        _store_gradient(
            d_rows, d_rows_2, d_sum, unit, d_unit, unit_factor, constant, rstds, first, start, rows, D_SUM,
            SECOND_DTYPE, DIM, ROWS, WIDTH,
        )  # fmt: skip


@triton.jit
def _unit_and_gradient(
    total, d_out, weight, means, rstds, first, start, rows,
    WEIGHT: tl.constexpr, OFFSET: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    EVICTION: tl.constexpr,
):  # fmt: skip
    """A tile of normalized rows before the weight, and its gradient, which is 0 outside the array."""
    base = first.to(tl.int64) * DIM
    rows_left = rows - first
    unit = load_tile(total + base, start, rows_left, DIM, ROWS, WIDTH, EVICTION).to(tl.float32)
    unit = (unit - means[:, None]) * rstds[:, None]
    d_unit = load_tile(d_out + base, start, rows_left, DIM, ROWS, WIDTH, EVICTION).to(tl.float32)
    if WEIGHT:
        d_unit *= load_columns(weight, start, True, DIM, WIDTH).to(tl.float32) + OFFSET
    return unit, d_unit


@triton.jit
def sum_over_rows(
    total, d_out, mean, rstd, rows,
    d_weight, d_bias,
    CENTERED: tl.constexpr, D_WEIGHT: tl.constexpr, D_BIAS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Partial sums of the gradients of weight and bias: a program sums the columns of one tile, over its share of the
    rows.
    """
    # Neighbouring programs read neighbouring columns of the same rows.
    start, part = tl.program_id(0) * WIDTH, tl.program_id(1)
    weight_sums, bias_sums = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(part * ROWS, rows, tl.num_programs(1) * ROWS):
        base = first.to(tl.int64) * DIM
        rows_left = rows - first
        d = load_tile(d_out + base, start, rows_left, DIM, ROWS, WIDTH, "").to(tl.float32)
        if D_WEIGHT:
            means, rstds = _load_statistics(mean, rstd, first, rows_left, CENTERED, ROWS)
            unit = load_tile(total + base, start, rows_left, DIM, ROWS, WIDTH, "").to(tl.float32)
            weight_sums += d * ((unit - means[:, None]) * rstds[:, None])
        if D_BIAS:
            bias_sums += d
    if D_WEIGHT:
        _store_sums(d_weight, weight_sums, part, start, DIM, WIDTH)
    if D_BIAS:
        _store_sums(d_bias, bias_sums, part, start, DIM, WIDTH)
