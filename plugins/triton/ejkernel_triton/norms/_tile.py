"""Device code that all normalizations share: tiles of rows in memory, and the statistics of long rows.

A tile is ``ROWS`` rows and ``WIDTH`` columns from the column ``start``. Pointers are those of the tile's first row, so
that only they need 64 bits. A row that is held in registers is a head, a power of two of columns, and after it a
smaller tail (``TAIL`` is 0 if there is none): a row of 5,120 entries takes 4,096 and 1,024 columns instead of 8,192.
Entries outside the array are 0.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def offsets_and_mask(start, rows, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The offsets of the entries of a tile, and whether they are inside the array, which has ``rows`` rows from the
    first of the tile on.
    """
    row = tl.arange(0, ROWS)[:, None]
    column = start + tl.arange(0, WIDTH)[None, :]
    return row * DIM + column, (row < rows) & (column < DIM)


@triton.jit
def load_tile(base, start, rows, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, EVICTION: tl.constexpr):
    """A tile in the dtype of the array. ``EVICTION``: how long the L2 cache should keep it."""
    offset, is_inside = offsets_and_mask(start, rows, DIM, ROWS, WIDTH)
    return tl.load(base + offset, mask=is_inside, other=0.0, eviction_policy=EVICTION)


@triton.jit
def store_tile(base, start, rows, tile, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Round a tile to the dtype of the array and store it."""
    offset, is_inside = offsets_and_mask(start, rows, DIM, ROWS, WIDTH)
    tl.store(base + offset, tile.to(base.dtype.element_ty), mask=is_inside)


@triton.jit
def load_columns(base, start, IS_PRESENT: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Columns of the weight or the bias, (1, WIDTH); 0 if the call does not have it."""
    if IS_PRESENT:
        column = start + tl.arange(0, WIDTH)[None, :]
        return tl.load(base + column, mask=column < DIM, other=0.0, eviction_policy="evict_last")
    return tl.zeros([1, WIDTH], base.dtype.element_ty)


@triton.jit
def load_total(x, residual, start, rows, RESIDUAL: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
               WIDTH: tl.constexpr, EVICTION: tl.constexpr):  # fmt: skip
    """The rows that are normalized, in float32: x, or its sum with the residual, rounded to the residual's dtype."""
    total = load_tile(x, start, rows, DIM, ROWS, WIDTH, EVICTION).to(tl.float32)
    if RESIDUAL:
        total += load_tile(residual, start, rows, DIM, ROWS, WIDTH, EVICTION).to(tl.float32)
        total = total.to(residual.dtype.element_ty).to(tl.float32)
    return total


@triton.jit
def centered_tile(tile, mean, start, rows, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The tile minus the mean of each row, and 0 outside the array."""
    _offset, is_inside = offsets_and_mask(start, rows, DIM, ROWS, WIDTH)
    return tl.where(is_inside, tile - mean[:, None], 0.0)


@triton.jit
def apply_weight(tile, weight, bias, WEIGHT: tl.constexpr, BIAS: tl.constexpr, OFFSET: tl.constexpr):
    """Normalized rows times the weight, plus the bias."""
    if WEIGHT:
        tile = tile * (weight.to(tl.float32) + OFFSET)
    if BIAS:
        tile = tile + bias.to(tl.float32)
    return tile


@triton.jit
def sum_of_rows(head, tail, TAIL: tl.constexpr):
    """The sum of each row."""
    sums = tl.sum(head, 1)
    if TAIL > 0:
        sums += tl.sum(tail, 1)
    return sums


@triton.jit
def normalized_rows(x, residual, total, mean, rstd, first, rows, RESIDUAL: tl.constexpr, STORE_STATISTICS: tl.constexpr,
                    CENTERED: tl.constexpr, EPSILON: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
                    WIDTH: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    """Rows from ``first``, each read once, divided by their root mean square: head and tail. Stores their sum with the
    residual, and with ``STORE_STATISTICS`` their statistics.
    """
    base = first.to(tl.int64) * DIM
    x, residual, total = x + base, residual + base, total + base
    rows = rows - first
    head = load_total(x, residual, 0, rows, RESIDUAL, DIM, ROWS, WIDTH, "")
    tail = head
    if TAIL > 0:
        tail = load_total(x, residual, WIDTH, rows, RESIDUAL, DIM, ROWS, TAIL, "")
    if RESIDUAL:
        store_tile(total, 0, rows, head, DIM, ROWS, WIDTH)
        if TAIL > 0:
            store_tile(total, WIDTH, rows, tail, DIM, ROWS, TAIL)
    row = tl.arange(0, ROWS)
    if CENTERED:
        means = sum_of_rows(head, tail, TAIL) * (1.0 / DIM)
        head = centered_tile(head, means, 0, rows, DIM, ROWS, WIDTH)
        if TAIL > 0:
            tail = centered_tile(tail, means, WIDTH, rows, DIM, ROWS, TAIL)
        if STORE_STATISTICS:
            tl.store(mean + first + row, means, mask=row < rows)
    rstds = tl.rsqrt(sum_of_rows(head * head, tail * tail, TAIL) * (1.0 / DIM) + EPSILON)
    if STORE_STATISTICS:
        tl.store(rstd + first + row, rstds, mask=row < rows)
    head = head * rstds[:, None]
    if TAIL > 0:
        tail = tail * rstds[:, None]
    return head, tail


@triton.jit
def statistics_of_long_rows(x, residual, total, rows, RESIDUAL: tl.constexpr, CENTERED: tl.constexpr,
                            EPSILON: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
                            WIDTH: tl.constexpr):  # fmt: skip
    """The mean and the reciprocal root mean square of rows that are read tile by tile. Stores their sum with the
    residual. The mean is 0 unless it is subtracted.

    Each entry of the tile keeps the mean and the sum of squares of its own columns, and updates them with each column:
    there is no difference of large numbers, and no exchange between threads before the end.
    """
    means = tl.zeros([ROWS, WIDTH], tl.float32)
    squares = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, DIM, WIDTH):
        tile = load_total(x, residual, start, rows, RESIDUAL, DIM, ROWS, WIDTH, "evict_last")
        if RESIDUAL:
            store_tile(total, start, rows, tile, DIM, ROWS, WIDTH)
        if CENTERED:
            _offset, is_inside = offsets_and_mask(start, rows, DIM, ROWS, WIDTH)
            difference = tl.where(is_inside, tile - means, 0.0)
            means += difference / (start // WIDTH + 1).to(tl.float32)
            squares += tl.where(is_inside, difference * (tile - means), 0.0)
        else:
            squares += tile * tile
    mean = tl.zeros([ROWS], tl.float32)
    sums = tl.sum(squares, 1)
    if CENTERED:
        # The last tile may be partly outside the array: the entries there have one column less.
        column = tl.arange(0, WIDTH)[None, :]
        counts = tl.where(column < (DIM - 1) % WIDTH + 1, 1.0, 0.0) + (DIM - 1) // WIDTH
        mean = tl.sum(means * counts, 1) * (1.0 / DIM)
        difference = means - mean[:, None]
        sums += tl.sum(difference * difference * counts, 1)
    return mean, tl.rsqrt(sums * (1.0 / DIM) + EPSILON)
