"""The backward kernels: gradients of rows, and partial sums of the gradients of weight and bias, which XLA adds up.

With ``unit``, the normalized row before the weight, and ``d_unit``, its gradient, the gradient of a row is
``(d_unit - unit * mean(d_unit * unit)) * rstd + d_sum``. Where the mean of a row is subtracted, so is ``mean(d_unit)``.
The gradient of the weight is the sum of ``d_out * unit`` over all rows, that of the bias the sum of ``d_out``.

Sums have a fixed order, so the bits are the same every time.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel_triton.norms._tile import load_columns, load_tile, store_tile


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
        d_sums = _load_d_sum(d_sum, first, 0, rows, D_SUM, DIM, ROWS, WIDTH)
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
        gradient = _gradient(unit, d_unit, unit_factor, constant, own_rstds)
        gradient += d_sums.to(tl.float32)
        _store_gradient(d_rows, d_rows_2, gradient, first, 0, rows, SECOND_DTYPE, DIM, ROWS, WIDTH)
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
    x = load_tile(total + base, 0, rows_left, DIM, ROWS, WIDTH, "")
    d = load_tile(d_out + base, 0, rows_left, DIM, ROWS, WIDTH, "")
    means, rstds = _load_row_numbers(mean, rstd, first, rows_left, CENTERED, ROWS)
    return x, d, means, rstds


@triton.jit
def _load_row_numbers(centered, other, first, rows, CENTERED: tl.constexpr, ROWS: tl.constexpr):
    """Two numbers of each of ``rows`` rows, the first of which is 0 unless the mean is subtracted: the mean and the
    reciprocal root mean square, or the two terms of ``reduce_rows``. Both are 0 after these rows.
    """
    row = tl.arange(0, ROWS)
    numbers = tl.zeros([ROWS], tl.float32)
    if CENTERED:
        numbers = tl.load(centered + first + row, mask=row < rows, other=0.0)
    return numbers, tl.load(other + first + row, mask=row < rows, other=0.0)


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
def _load_d_sum(d_sum, first, start, rows, D_SUM: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
                WIDTH: tl.constexpr):  # fmt: skip
    """A tile of the gradient of the sum, which is added to that of the rows; 0 if the call does not have it."""
    if D_SUM:
        return load_tile(d_sum + first.to(tl.int64) * DIM, start, rows - first, DIM, ROWS, WIDTH, "")
    return tl.zeros([ROWS, WIDTH], d_sum.dtype.element_ty)


@triton.jit
def _gradient(unit, d_unit, unit_factor, constant, rstds):
    """The gradient of a tile of rows, from the terms of `_statistics_terms`."""
    return (d_unit - unit * unit_factor[:, None]) * rstds[:, None] - constant[:, None]


@triton.jit
def _store_gradient(d_rows, d_rows_2, gradient, first, start, rows, SECOND_DTYPE: tl.constexpr, DIM: tl.constexpr,
                    ROWS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    base = first.to(tl.int64) * DIM
    store_tile(d_rows + base, start, rows - first, gradient, DIM, ROWS, WIDTH)
    if SECOND_DTYPE:
        store_tile(d_rows_2 + base, start, rows - first, gradient, DIM, ROWS, WIDTH)


@triton.jit
def _store_sums(sums, tile, part, start, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Store the sum over the rows of a tile as columns of the row ``part`` of the partial sums."""
    column = start + tl.arange(0, WIDTH)
    tl.store(sums + part.to(tl.int64) * DIM + column, tl.sum(tile, 0), mask=column < DIM)


@triton.jit
def differentiate_wide(
    total, d_out, d_sum, d_mean, d_rstd, weight, mean, rstd, rows,
    d_rows, d_rows_2, d_weight, d_bias,
    D_SUM: tl.constexpr, D_MEAN: tl.constexpr, D_RSTD: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr,
    CENTERED: tl.constexpr, SECOND_DTYPE: tl.constexpr, D_WEIGHT: tl.constexpr, D_BIAS: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for rows so long that registers hold the sums over rows alone. Each row is read in blocks for the terms
    of its statistics, and then again, from the L1 cache.
    """
    weight_sums, bias_sums = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    part = tl.program_id(0)
    for first in range(part * ROWS, rows, tl.num_programs(0) * ROWS):
        means, rstds = _load_row_numbers(mean, rstd, first, rows - first, CENTERED, ROWS)
        unit_factor, constant = _terms_of_long_rows(
            total, d_out, d_mean, d_rstd, weight, means, rstds, first, rows, D_MEAN, D_RSTD, WEIGHT, OFFSET, CENTERED,
            DIM, ROWS, BLOCK,
        )  # fmt: skip
        unit, d_unit = _unit_and_gradient(
            total, d_out, weight, means, rstds, first, 0, rows, False, OFFSET, DIM, ROWS, WIDTH, ""
        )
        if D_WEIGHT:
            weight_sums += d_unit * unit
        if D_BIAS:
            bias_sums += d_unit
        if WEIGHT:
            d_unit *= load_columns(weight, 0, True, DIM, WIDTH).to(tl.float32) + OFFSET
        gradient = _gradient(unit, d_unit, unit_factor, constant, rstds)
        gradient += _load_d_sum(d_sum, first, 0, rows, D_SUM, DIM, ROWS, WIDTH).to(tl.float32)
        _store_gradient(d_rows, d_rows_2, gradient, first, 0, rows, SECOND_DTYPE, DIM, ROWS, WIDTH)
    if D_WEIGHT:
        _store_sums(d_weight, weight_sums, part, 0, DIM, WIDTH)
    if D_BIAS:
        _store_sums(d_bias, bias_sums, part, 0, DIM, WIDTH)


@triton.jit
def _terms_of_long_rows(
    total, d_out, d_mean, d_rstd, weight, means, rstds, first, rows,
    D_MEAN: tl.constexpr, D_RSTD: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr, CENTERED: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The terms of `_statistics_terms` for rows that are read in blocks."""
    products, sums = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, DIM, WIDTH):
        unit, d_unit = _unit_and_gradient(
            total, d_out, weight, means, rstds, first, start, rows, WEIGHT, OFFSET, DIM, ROWS, WIDTH, ""
        )
        products += d_unit * unit
        if CENTERED:
            sums += d_unit
    return _statistics_terms(
        tl.sum(products, 1), tl.sum(sums, 1), d_mean, d_rstd, rstds, first, rows, D_MEAN, D_RSTD, DIM, ROWS
    )


@triton.jit
def reduce_rows(
    total, d_out, d_mean, d_rstd, weight, mean, rstd, rows,
    unit_factors, constants,
    D_MEAN: tl.constexpr, D_RSTD: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr, CENTERED: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store the terms of `_statistics_terms` for rows of any length, for ``differentiate_columns``."""
    first = tl.program_id(0) * ROWS
    means, rstds = _load_row_numbers(mean, rstd, first, rows - first, CENTERED, ROWS)
    unit_factor, constant = _terms_of_long_rows(
        total, d_out, d_mean, d_rstd, weight, means, rstds, first, rows, D_MEAN, D_RSTD, WEIGHT, OFFSET, CENTERED,
        DIM, ROWS, WIDTH,
    )  # fmt: skip
    row = tl.arange(0, ROWS)
    tl.store(unit_factors + first + row, unit_factor, mask=row < rows - first)
    if CENTERED:
        tl.store(constants + first + row, constant, mask=row < rows - first)


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
def differentiate_columns(
    total, d_out, d_sum, weight, mean, rstd, unit_factors, constants, rows,
    d_rows, d_rows_2, d_weight, d_bias,
    D_ROWS: tl.constexpr, D_SUM: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr, CENTERED: tl.constexpr,
    SECOND_DTYPE: tl.constexpr, D_WEIGHT: tl.constexpr, D_BIAS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Some columns of the gradients of rows whose terms ``reduce_rows`` has stored, and of the partial sums over rows.
    Without ``D_ROWS``, the sums alone.

    It takes the rows from the last on, because the L2 cache still has those that ``reduce_rows`` has read last.
    """
    # Neighbouring programs read neighbouring columns of the same rows.
    start, part = tl.program_id(0) * WIDTH, tl.program_id(1)
    w = load_columns(weight, start, WEIGHT, DIM, WIDTH)
    weight_sums, bias_sums = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    tiles = tl.cdiv(rows, ROWS)
    for tile in range(part, tiles, tl.num_programs(1)):
        first = (tiles - 1 - tile) * ROWS
        base = first.to(tl.int64) * DIM
        rows_left = rows - first
        means, rstds = _load_row_numbers(mean, rstd, first, rows_left, CENTERED, ROWS)
        d_unit = load_tile(d_out + base, start, rows_left, DIM, ROWS, WIDTH, "").to(tl.float32)
        if D_ROWS or D_WEIGHT:
            unit = load_tile(total + base, start, rows_left, DIM, ROWS, WIDTH, "").to(tl.float32)
            unit = (unit - means[:, None]) * rstds[:, None]
        if D_WEIGHT:
            weight_sums += d_unit * unit
        if D_BIAS:
            bias_sums += d_unit
        if D_ROWS:
            if WEIGHT:
                d_unit *= w.to(tl.float32) + OFFSET
            constant, unit_factor = _load_row_numbers(constants, unit_factors, first, rows_left, CENTERED, ROWS)
            gradient = _gradient(unit, d_unit, unit_factor, constant, rstds)
            gradient += _load_d_sum(d_sum, first, start, rows, D_SUM, DIM, ROWS, WIDTH).to(tl.float32)
            _store_gradient(d_rows, d_rows_2, gradient, first, start, rows, SECOND_DTYPE, DIM, ROWS, WIDTH)
    if D_WEIGHT:
        _store_sums(d_weight, weight_sums, part, start, DIM, WIDTH)
    if D_BIAS:
        _store_sums(d_bias, bias_sums, part, start, DIM, WIDTH)
