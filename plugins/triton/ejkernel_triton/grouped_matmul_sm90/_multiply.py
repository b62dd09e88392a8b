"""The product of rows with the matrix of their group: one warp finds the tiles of the result, one fetches tiles of the
operands into shared memory, and two groups of four warps multiply.

Each group has half of the rows of a tile of the result, and both read the same tiles of the matrix. Programs are
persistent: each takes one tile of the result after another, and the operands of the next one are fetched while the
results of this one are stored.

Matrix products are asynchronous. Nothing may use the registers of a product before `warpgroup_mma_wait` returns them.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from ejkernel_triton.gluon import tma
from ejkernel_triton.gluon.constants import LOG2E
from ejkernel_triton.gluon.shared_memory import barriers
from ejkernel_triton.grouped_matmul_sm90._pipeline import DEPTH, DONE, HALF, Stages, queue


@aggregate
class Call:
    """What all warps know of the call."""

    #: From the kernel before: how many tiles of rows there are, and of each its group, its first row and its end.
    table: gl.tensor
    #: The columns of the result and of a tile of it, and how many tiles stand side by side.
    WIDTH: gl.constexpr
    COLUMNS: gl.constexpr
    COLUMN_TILES: gl.constexpr
    #: How many steps a product has.
    STEPS: gl.constexpr
    TRANSPOSED: gl.constexpr
    #: None, or how the gates are arranged: "halves" or "pairs".
    GATES: gl.constexpr
    #: Tiles of rows that are neighbours in time, so that they find the same matrix in the L2.
    BAND: gl.constexpr
    #: The columns of the matrix in a tile, and in each of the boxes that are fetched for it, of which there are one or
    #: two. A second one has the values for the gates in the first, or the columns after them.
    SIZE: gl.constexpr
    BOX: gl.constexpr
    #: Whether the last tile has no columns in its second box.
    NARROW: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, table, K, N, SIZE, BOX, TRANSPOSED, GATES, BAND):
        self.table = table
        width, columns = (N, SIZE) if GATES is None else (N // 2, SIZE // 2)
        self.WIDTH = gl.constexpr(width)
        self.COLUMNS = gl.constexpr(columns)
        self.COLUMN_TILES = gl.constexpr((width + columns - 1) // columns)
        self.STEPS = gl.constexpr((K + DEPTH - 1) // DEPTH)
        self.TRANSPOSED = gl.constexpr(TRANSPOSED)
        self.GATES = gl.constexpr(GATES)
        self.BAND = gl.constexpr(BAND)
        self.SIZE = gl.constexpr(SIZE)
        self.BOX = gl.constexpr(BOX)
        self.NARROW = gl.constexpr(GATES != "halves" and 0 < N % SIZE <= SIZE - BOX)

    @gluon.jit
    def tile(self, number, row_tiles):
        """The group of a tile, its first row, the row where the group ends, and its place in a row of tiles."""
        band = number // (self.BAND * self.COLUMN_TILES)
        height = gl.minimum(row_tiles - band * self.BAND, self.BAND)
        place = number - band * (self.BAND * self.COLUMN_TILES)
        entry = self.table + 4 * (1 + band * self.BAND + place % height)
        return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), place // height

    @gluon.jit
    def box(self, tile, PLACE: gl.constexpr):
        """A box of a tile of the matrix."""
        AXIS: gl.constexpr = 1 if self.TRANSPOSED else 2
        return tile if self.BOX == self.SIZE else tile.slice(PLACE * self.BOX, self.BOX, AXIS)

    @gluon.jit
    def operand(self, tile, SIZE: gl.constexpr):
        """The first columns of a tile of the matrix, as the second operand of a product."""
        tile = tile.reshape([tile.shape[1], tile.shape[2]])
        if SIZE < self.SIZE:
            tile = tile.slice(0, SIZE, 0 if self.TRANSPOSED else 1)
        if self.TRANSPOSED:
            tile = tile.permute((1, 0))
        return tile


@gluon.jit
def multiply(
    lhs, rhs, table, bias,
    out,
    K: gl.constexpr, N: gl.constexpr, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr, BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, GATES: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    BOX: gl.constexpr = rhs.block_shape[1 if TRANSPOSED else 2]
    call = Call(table, K, N, COLUMNS, BOX, TRANSPOSED, GATES, BAND)
    rows = gl.allocate_shared_memory(lhs.dtype, [2 * STAGES] + lhs.block_shape, lhs.layout)
    TILE: gl.constexpr = [1, call.SIZE, DEPTH] if TRANSPOSED else [1, DEPTH, call.SIZE]
    matrix = gl.allocate_shared_memory(rhs.dtype, [STAGES] + TILE, rhs.layout)
    stages = Stages(rows, matrix, barriers(STAGES, 1), barriers(STAGES, 2), STAGES)
    tiles = queue()
    fence_async_shared()
    gl.warp_specialize(
        [
            (_warp_group_0, (call, tiles, stages, bias, out, N, BIAS, ACTIVATION)),
            (_warp_group_1, (call, tiles, stages, bias, out, N, BIAS, ACTIVATION)),
            (_fetch, (call, tiles, stages, lhs, rhs)),
            (_announce, (call, tiles)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


@gluon.jit
def _announce(call, tiles):
    """The work of the warp that finds tiles. It is ahead of all others, because memory may be slow to answer it."""
    row_tiles = gl.load(call.table)
    number = gl.program_id(0)
    turn = 0
    while number < row_tiles * call.COLUMN_TILES:
        group, first, end, column = call.tile(number, row_tiles)
        tiles.put(turn, group, first, end, column)
        # All programs are at about the same place, so that they share what is in the L2.
        number += gl.num_programs(0)
        turn += 1
    tiles.put(turn, DONE, 0, 0, 0)


@gluon.jit
def _fetch(call, tiles, stages, lhs, rhs):
    """The work of the warp that fetches: all tiles, in the order in which the other warps read them."""
    step, turn = 0, 0
    group, first, _, column = tiles.get(turn, 1)
    while group != DONE:
        column *= call.COLUMNS
        if group >= 0:
            for s in range(call.STEPS):
                _fetch_step(call, stages, lhs, rhs, step, group, first, column, s * DEPTH)
                step += 1
        turn += 1
        group, first, _, column = tiles.get(turn, 1)


@gluon.jit
def _fetch_step(call, stages, lhs, rhs, step, group, first, column, depth):
    stages.wait_until_empty(step)
    full = stages.full.index(step % stages.COUNT)
    BYTES: gl.constexpr = 2 * lhs.block_type.nbytes + rhs.block_type.nbytes
    has_second_box = call.BOX < call.SIZE and (not call.NARROW or column + call.COLUMNS <= call.WIDTH)
    if has_second_box:
        mbarrier.expect(full, BYTES + rhs.block_type.nbytes)
    else:
        mbarrier.expect(full, BYTES)
    for half in gl.static_range(2):
        tma.load(lhs, [first + half * HALF, depth], full, stages.rows_of(step, half))
    tile = stages.matrix_of(step)
    first_column = column * (2 if call.GATES == "pairs" else 1)
    _fetch_box(call, rhs, group, first_column, depth, full, call.box(tile, 0))
    if has_second_box:
        second_column = column + call.WIDTH if call.GATES == "halves" else first_column + call.BOX
        _fetch_box(call, rhs, group, second_column, depth, full, call.box(tile, 1))


@gluon.jit
def _fetch_box(call, rhs, group, column, depth, full, box):
    if call.TRANSPOSED:
        tma.load(rhs, [group, column, depth], full, box)
    else:
        tma.load(rhs, [group, depth, column], full, box)


@gluon.jit
def _warp_group_0(call, tiles, stages, bias, out, N: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr):
    _multiply(0, call, tiles, stages, bias, out, N, BIAS, ACTIVATION)


@gluon.jit
def _warp_group_1(call, tiles, stages, bias, out, N: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr):
    _multiply(1, call, tiles, stages, bias, out, N, BIAS, ACTIVATION)


@gluon.jit
def _multiply(
    WARP_GROUP: gl.constexpr, call, tiles, stages, bias, out, N: gl.constexpr, BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """The work of a group of four warps: half of the rows of each tile."""
    step, turn = 0, 0
    group, first, end, column = tiles.get(turn, 4)
    while group != DONE:
        column *= call.COLUMNS  # so that it is known to be a multiple
        first += WARP_GROUP * HALF
        if group >= 0 and first >= end:
            # The last tile of a group may have no rows for this group of warps.
            for _ in range(call.STEPS):
                stages.wait_until_full(step)
                stages.release(step)
                step += 1
        elif call.NARROW and column + call.COLUMNS > call.WIDTH:
            step = _compute(
                WARP_GROUP, call.BOX, call, stages, step, bias, out, group, first, end, column, N, BIAS, ACTIVATION
            )
        else:
            step = _compute(
                WARP_GROUP, call.SIZE, call, stages, step, bias, out, group, first, end, column, N, BIAS, ACTIVATION
            )
        turn += 1
        group, first, end, column = tiles.get(turn, 4)


@gluon.jit
def _compute(
    WARP_GROUP: gl.constexpr, SIZE: gl.constexpr, call, stages, step, bias, out, group, first, end, column,
    N: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Half of the rows of a tile, from ``SIZE`` columns of the matrix.

    Without a group they are 0. Returns the next step.
    """
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    total = gl.zeros([HALF, SIZE], gl.float32, ACC)
    if group >= 0:
        for s in range(call.STEPS):
            stages.wait_until_full(step)
            tile = call.operand(stages.matrix_of(step), SIZE)
            total = warpgroup_mma(stages.rows_of(step, WARP_GROUP), tile, total, is_async=True)
            total = warpgroup_mma_wait(1, [total])
            # The product of the step before has ended.
            if s > 0:
                stages.release(step - 1)
            step += 1
        total = warpgroup_mma_wait(0, [total])
        stages.release(step - 1)
        if BIAS:
            place = gl.arange(0, SIZE, gl.SliceLayout(0, ACC))
            total += _bias_of(call, bias + group.to(gl.int64) * N, column, N, place)[None, :]
    if ACTIVATION is not None:
        if call.GATES == "halves":
            gate, up = gl.split(total.reshape([HALF, 2, SIZE // 2]).permute((0, 2, 1)))
        else:
            gate, up = gl.split(total.reshape([HALF, SIZE // 2, 2]))
        total = _activated(gate, up, ACTIVATION)
    _store(call, out, total.to(out.dtype.element_ty), first, end, column)
    return step


@gluon.jit
def _bias_of(call, bias, column, N: gl.constexpr, place):
    """The bias of the columns of the matrix in a tile."""
    if call.GATES == "halves":
        place = column + place % call.BOX + place // call.BOX * call.WIDTH
    elif call.GATES == "pairs":
        place += 2 * column
    else:
        place += column
    return gl.load(bias + place, mask=place < N, other=0).to(gl.float32)


@gluon.jit
def _activated(gate, up, ACTIVATION: gl.constexpr):
    if ACTIVATION == "silu_gated":
        result = gate * _sigmoid(gate) * up
    elif ACTIVATION == "gelu_gated":
        # The tanh is -1 where that of the definition is, so that the result is 0 there.
        tanh = 2 * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) - 1
        result = 0.5 * gate * (1 + tanh) * up
    else:
        # By comparisons, which keep what is not a number.
        gate = gl.where(gate > 7.0, 7.0, gate)
        up = gl.where(up > 7.0, 7.0, gl.where(up < -7.0, -7.0, up))
        result = gate * _sigmoid(1.702 * gate) * (up + 1)
    return result


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp2(x * -LOG2E))


@gluon.jit
def _store(call, out, values, first, end, column):
    """Store the rows of a tile that belong to its group, whole: that is faster than the pieces that a thread has."""
    COLUMNS: gl.constexpr = values.shape[1]
    # Eight numbers for each thread: of 16 bits, 16 bytes.
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    values = gl.convert_layout(values, LINES)
    row = first + gl.arange(0, HALF, gl.SliceLayout(1, LINES))
    place = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, LINES))
    places = row.to(gl.int64)[:, None] * call.WIDTH + place[None, :]
    gl.store(out + places, values, mask=(row < end)[:, None] & (place < call.WIDTH)[None, :])
