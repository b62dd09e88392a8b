"""The forward kernels with 8-bit results: rows that are held in registers, and long rows, which are read again.

A scale covers a row (``BLOCK`` is 0) or ``BLOCK`` columns. It is the largest magnitude divided by ``LARGEST``, and 1 if
all entries are 0.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel_triton.norms._forward import _weighted_tile
from ejkernel_triton.norms._tile import (
    apply_weight,
    load_columns,
    normalized_rows,
    offsets_and_mask,
    statistics_of_long_rows,
    store_tile,
)

# To add it to a float32 and to subtract it again rounds to the nearest whole number, and halves to even.
ROUNDING_NUMBER: tl.constexpr = tl.constexpr(12582912.0)
# The reciprocal of a smaller scale may be infinite.
SMALLEST_NORMAL: tl.constexpr = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def quantize(
    x, residual, weight, bias, rows,
    values, scales, total,
    RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, OFFSET: tl.constexpr, CENTERED: tl.constexpr,
    EPSILON: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """Rows that are held in registers. They have no tail: stores of 8-bit tails would need another layout."""
    w, b = load_columns(weight, 0, WEIGHT, DIM, WIDTH), load_columns(bias, 0, BIAS, DIM, WIDTH)
    first = tl.program_id(0) * ROWS
    tile, _tail = normalized_rows(
        x, residual, total, scales, scales, first, rows, RESIDUAL, False, CENTERED, EPSILON, DIM, ROWS, WIDTH, 0
    )
    tile = apply_weight(tile, w, b, WEIGHT, BIAS, OFFSET)
    values += first.to(tl.int64) * DIM
    rows_left = rows - first
    if BLOCK > 0:
        scales += first.to(tl.int64) * ((DIM + BLOCK - 1) // BLOCK)
        _store_blocks(values, scales, 0, rows_left, tile, DIM, ROWS, WIDTH, BLOCK, LARGEST)
    else:
        scale = _scale(tl.max(tl.abs(tile), 1), LARGEST)
        row = tl.arange(0, ROWS)
        tl.store(scales + first + row, scale, mask=row < rows_left)
        _store_values(values, 0, rows_left, tile, scale[:, None], DIM, ROWS, WIDTH)


@triton.jit
def quantize_long(
    x, residual, weight, bias, rows,
    values, scales, total,
    RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, OFFSET: tl.constexpr, CENTERED: tl.constexpr,
    EPSILON: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """Rows that are read tile by tile: twice, or three times where a scale covers a row."""
    first = tl.program_id(0) * ROWS
    base = first.to(tl.int64) * DIM
    x, residual, values, total = x + base, residual + base, values + base, total + base
    rows_left = rows - first
    means, rstds = statistics_of_long_rows(
        x, residual, total, rows_left, RESIDUAL, CENTERED, EPSILON, DIM, ROWS, WIDTH
    )  # fmt: skip
    if BLOCK > 0:
        scales += first.to(tl.int64) * ((DIM + BLOCK - 1) // BLOCK)
        for start in range(0, DIM, WIDTH):
            tile = _inner_tile(
                x, residual, weight, bias, means, rstds, start, rows_left, RESIDUAL, WEIGHT, BIAS, OFFSET, DIM, ROWS,
                WIDTH, "evict_first",
            )  # fmt: skip
            _store_blocks(values, scales, start, rows_left, tile, DIM, ROWS, WIDTH, BLOCK, LARGEST)
    else:
        largest = tl.zeros([ROWS, WIDTH], tl.float32)
        for start in range(0, DIM, WIDTH):
            tile = _inner_tile(
                x, residual, weight, bias, means, rstds, start, rows_left, RESIDUAL, WEIGHT, BIAS, OFFSET, DIM, ROWS,
                WIDTH, "evict_last",
            )  # fmt: skip
            largest = tl.maximum(largest, tl.abs(tile))
        scale = _scale(tl.max(largest, 1), LARGEST)
        row = tl.arange(0, ROWS)
        tl.store(scales + first + row, scale, mask=row < rows_left)
        for start in range(0, DIM, WIDTH):
            tile = _inner_tile(
                x, residual, weight, bias, means, rstds, start, rows_left, RESIDUAL, WEIGHT, BIAS, OFFSET, DIM, ROWS,
                WIDTH, "evict_first",
            )  # fmt: skip
            _store_values(values, start, rows_left, tile, scale[:, None], DIM, ROWS, WIDTH)


@triton.jit
def _inner_tile(
    x, residual, weight, bias, means, rstds, start, rows,
    RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, OFFSET: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    """A tile of long rows, normalized and weighted, and 0 outside the array."""
    tile = _weighted_tile(
        x, residual, weight, bias, means, rstds, start, rows, RESIDUAL, WEIGHT, BIAS, OFFSET, DIM, ROWS, WIDTH, EVICTION
    )  # fmt: skip
    _offset, is_inside = offsets_and_mask(start, rows, DIM, ROWS, WIDTH)
    return tl.where(is_inside, tile, 0.0)


@triton.jit
def _scale(largest, LARGEST: tl.constexpr):
    return tl.where(largest == 0.0, 1.0, tl.div_rn(largest, LARGEST))


@triton.jit
def _store_blocks(values, scales, start, rows, tile, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
                  BLOCK: tl.constexpr, LARGEST: tl.constexpr):  # fmt: skip
    """Store the values and the scales of a tile with a scale for each block of columns."""
    BLOCKS: tl.constexpr = WIDTH // BLOCK
    SCALES: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    largest = tl.max(tl.abs(tl.reshape(tile, [ROWS, BLOCKS, BLOCK])), 2)
    scale = _scale(largest, LARGEST)
    row = tl.arange(0, ROWS)[:, None]
    block = start // BLOCK + tl.arange(0, BLOCKS)[None, :]
    tl.store(scales + row * SCALES + block, scale, mask=(row < rows) & (block < SCALES))
    scales_of_columns = tl.broadcast_to(scale[:, :, None], [ROWS, BLOCKS, BLOCK])
    _store_values(values, start, rows, tile, tl.reshape(scales_of_columns, [ROWS, WIDTH]), DIM, ROWS, WIDTH)


@triton.jit
def _store_values(values, start, rows, tile, scale, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Divide a tile by its scales, round it to 8 bits, and store it."""
    # The product with the reciprocal, corrected by its remainder, is rounded like a quotient, and is much faster.
    reciprocal = 1.0 / tl.maximum(scale, SMALLEST_NORMAL)
    quotient = tile * reciprocal
    remainder = tl.fma(-quotient, tl.broadcast_to(scale, [ROWS, WIDTH]), tile)
    quotient = tl.fma(remainder, tl.broadcast_to(reciprocal, [ROWS, WIDTH]), quotient)
    if values.dtype.element_ty == tl.int8:
        quotient = (quotient + ROUNDING_NUMBER) - ROUNDING_NUMBER
    store_tile(values, start, rows, quotient, DIM, ROWS, WIDTH)
