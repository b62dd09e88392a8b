"""The products of groups: of rows with the matrix of their group, and of rows contracted within each group."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply(
    lhs, rhs, boundaries, bias, token_order, rows,
    out,
    K: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, CHOSEN: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """A tile of the result a program: rows of one group, or rows of none, which become 0.

    With CHOSEN, ``lhs`` has tokens with so many rows each, in the order that ``token_order`` has.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    WIDTH: tl.constexpr = N // 2 if GATED else N
    tile, column_tile = _swizzled(tl.program_id(0), tl.cdiv(rows, ROWS) + GROUPS + 1, tl.cdiv(WIDTH, COLUMNS), BAND)
    group, first, end = _find_tile(boundaries, tile, rows, GROUPS, PARTS, ROWS)
    if first < end:
        is_group = (group >= 0) & (group < GROUPS)
        depth = tl.where(is_group, K, 0)
        group = tl.where(is_group, group, 0)
        row = tl.arange(0, ROWS)
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        is_row, is_column = row < end - first, column < WIDTH
        if CHOSEN is None:
            source = row
            lhs += first.to(tl.int64) * K
        else:
            source = tl.load(token_order + first + row, mask=is_row, other=0) // CHOSEN
        rhs += group.to(tl.int64) * K * N
        # The columns of the gates and of the values: halves, or alternating.
        gate = 2 * column if ACTIVATION == "swiglu_oai" else column
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        if GATED:
            up = gate + 1 if ACTIVATION == "swiglu_oai" else gate + WIDTH
            up_total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, depth, DEPTH):
            a = _load(lhs, source, start, is_row, K, DEPTH)
            total = _add_product(total, a, rhs, gate, start, is_column, K, N, TRANSPOSED, DEPTH, PRECISION)
            if GATED:
                up_total = _add_product(up_total, a, rhs, up, start, is_column, K, N, TRANSPOSED, DEPTH, PRECISION)
        if BIAS:
            bias += group.to(tl.int64) * N
            total += tl.load(bias + gate, mask=is_column & is_group, other=0).to(tl.float32)[None, :]
            if GATED:
                up_total += tl.load(bias + up, mask=is_column & is_group, other=0).to(tl.float32)[None, :]
        if GATED:
            total = _activated(total, up_total, ACTIVATION)
        places = (first + row).to(tl.int64)[:, None] * WIDTH + column[None, :]
        tl.store(out + places, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def contract(
    first, second, boundaries,
    out,
    K: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """A tile of the matrix of one group a program: the rows of two arrays, contracted. Without rows it is 0."""
    group = tl.program_id(1)
    row_tile, column_tile = _swizzled(tl.program_id(0), tl.cdiv(K, ROWS), tl.cdiv(N, COLUMNS), BAND)
    start, end = tl.load(boundaries + group), tl.load(boundaries + group + 1)
    row, column = row_tile * ROWS + tl.arange(0, ROWS), column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < K, column < N
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    first += start.to(tl.int64) * K
    second += start.to(tl.int64) * N
    for begin in range(0, end - start, DEPTH):
        place = (begin + depth).to(tl.int64)
        is_own = begin + depth < end - start
        a = tl.load(first + place[:, None] * K + row[None, :], mask=is_own[:, None] & is_row[None, :], other=0)
        b = tl.load(second + place[:, None] * N + column[None, :], mask=is_own[:, None] & is_column[None, :], other=0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    out += group.to(tl.int64) * K * N
    places = row.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _swizzled(program, row_tiles, column_tiles, BAND: tl.constexpr):
    """The tile of a program: those of a band of rows are neighbours, so that they find what they share in the L2."""
    band = program // (BAND * column_tiles)
    height = tl.minimum(row_tiles - band * BAND, BAND)
    place = program - band * BAND * column_tiles
    return band * BAND + place % height, place // height


@triton.jit
def _find_tile(boundaries, tile, rows, GROUPS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """The group of a tile, its first row, and the row where the group ends.

    The parts of the rows are those before the first group, the groups, and those after the last one. Each begins with a
    tile of its own. A tile that is none ends where it begins.
    """
    part = tl.arange(0, PARTS)
    starts = tl.load(boundaries + part - 1, mask=(part > 0) & (part <= GROUPS + 1), other=0)
    ends = tl.load(boundaries + part, mask=part <= GROUPS, other=0)
    ends = tl.where(part == GROUPS + 1, rows, ends)
    tiles = tl.where(part <= GROUPS + 1, (ends - starts + ROWS - 1) // ROWS, 0)
    tiles_so_far = tl.cumsum(tiles, 0)
    number = tl.sum((tiles_so_far <= tile).to(tl.int32), 0)
    is_own = part == number
    first = tl.sum(tl.where(is_own, starts + (tile - (tiles_so_far - tiles)) * ROWS, 0), 0)
    return number - 1, first, tl.sum(tl.where(is_own, ends, 0), 0)


@triton.jit
def _load(lhs, row, start, is_row, K: tl.constexpr, DEPTH: tl.constexpr):
    """A tile of ``lhs``, from the column ``start`` on."""
    depth = start + tl.arange(0, DEPTH)
    mask = is_row[:, None]
    if K % DEPTH:
        mask = mask & (depth < K)[None, :]
    return tl.load(lhs + row.to(tl.int64)[:, None] * K + depth[None, :], mask=mask, other=0)


@triton.jit
def _add_product(
    total, a, rhs, column, start, is_column,
    K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The total and the product with these columns of the matrix."""
    depth = start + tl.arange(0, DEPTH)
    if TRANSPOSED:
        places, mask = column[:, None] * K + depth[None, :], is_column[:, None]
        if K % DEPTH:
            mask = mask & (depth < K)[None, :]
        b = tl.trans(tl.load(rhs + places, mask=mask, other=0))
    else:
        places, mask = depth[:, None] * N + column[None, :], is_column[None, :]
        if K % DEPTH:
            mask = mask & (depth < K)[:, None]
        b = tl.load(rhs + places, mask=mask, other=0)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _activated(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu_gated":
        return gate * tl.sigmoid(gate) * up
    if ACTIVATION == "gelu_gated":
        # The tanh is -1 where that of the definition is, so that the result is 0 there.
        tanh = 2 * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) - 1
        return 0.5 * gate * (1 + tanh) * up
    # By comparisons, which keep what is not a number.
    gate = tl.where(gate > 7.0, 7.0, gate)
    up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
    return gate * tl.sigmoid(1.702 * gate) * (up + 1)
