"""The rows of two arrays, contracted within each group: one warp finds the tiles of the result, one fetches tiles of
the operands into shared memory, and two groups of four warps multiply, each for half of the rows of a tile.

Programs are persistent, and begin with the largest groups. The last step of a group fetches rows of the next one, too.
They are set to zero in shared memory, in both operands: what stands there may be infinite.
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
from ejkernel_triton.gluon.shared_memory import barriers
from ejkernel_triton.grouped_matmul_sm90._pipeline import DEPTH, DONE, HALF, Stages, queue


@aggregate
class Call:
    """What all warps know of the call."""

    #: From the kernel before: how many groups have narrow tiles, and of each group its number and its rows. Those with
    #: the most rows come first.
    table: gl.tensor
    GROUPS: gl.constexpr
    #: The sizes of a matrix, and the columns of a tile of it.
    K: gl.constexpr
    N: gl.constexpr
    COLUMNS: gl.constexpr
    #: The columns that are fetched at a time, and those of a narrow tile.
    BOX: gl.constexpr
    #: Tiles of rows that are neighbours in time, so that they find the same columns in the L2.
    BAND: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, table, GROUPS, K, N, COLUMNS, BOX, BAND):
        self.table = table
        self.GROUPS = gl.constexpr(GROUPS)
        self.K = gl.constexpr(K)
        self.N = gl.constexpr(N)
        self.COLUMNS = gl.constexpr(COLUMNS)
        self.BOX = gl.constexpr(BOX)
        self.BAND = gl.constexpr(BAND)

    @gluon.jit
    def tiles(self, COLUMNS: gl.constexpr):
        """The number of tiles of a matrix, if they have so many columns."""
        return gl.cdiv(self.K, 2 * HALF) * gl.cdiv(self.N, COLUMNS)

    @gluon.jit
    def box(self, tile, PLACE: gl.constexpr):
        """Part of the columns of a tile: what is fetched at a time."""
        return tile if self.BOX == self.COLUMNS else tile.slice(PLACE * self.BOX, self.BOX, 1)

    @gluon.jit
    def place(self, number, COLUMNS: gl.constexpr):
        """The place of a tile in a column of tiles of a matrix, and its first column."""
        row_tiles: gl.constexpr = (self.K + 2 * HALF - 1) // (2 * HALF)
        column_tiles: gl.constexpr = (self.N + COLUMNS - 1) // COLUMNS
        band = number // (self.BAND * column_tiles)
        height = gl.minimum(row_tiles - band * self.BAND, self.BAND)
        number -= band * (self.BAND * column_tiles)
        return band * self.BAND + number % height, number // height * COLUMNS

    @gluon.jit
    def tile(self, number, narrow):
        """The place of a tile's group in the table, its row of tiles, its first column, and whether it is narrow."""
        narrow_tiles = narrow * self.tiles(self.BOX)
        if number < narrow_tiles:
            index = number // self.tiles(self.BOX)
            row, column = self.place(number % self.tiles(self.BOX), self.BOX)
            is_narrow = True
        else:
            number -= narrow_tiles
            index = narrow + number // self.tiles(self.COLUMNS)
            row, column = self.place(number % self.tiles(self.COLUMNS), self.COLUMNS)
            is_narrow = column + self.BOX >= self.N
        return index, row, column, is_narrow


@gluon.jit
def contract(
    first, second, table,
    out, counter,
    GROUPS: gl.constexpr, K: gl.constexpr, N: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr,
):  # fmt: skip
    call = Call(table, GROUPS, K, N, COLUMNS, second.block_shape[1], BAND)
    rows = gl.allocate_shared_memory(first.dtype, [2 * STAGES] + first.block_shape, first.layout)
    matrix = gl.allocate_shared_memory(second.dtype, [STAGES, DEPTH, COLUMNS], second.layout)
    stages = Stages(rows, matrix, barriers(STAGES, 1), barriers(STAGES, 2), STAGES)
    masked = barriers(1, 2)
    tiles = queue()
    fence_async_shared()
    gl.warp_specialize(
        [
            (_warp_group_0, (call, tiles, stages, masked, out)),
            (_warp_group_1, (call, tiles, stages, masked, out)),
            (_fetch, (call, tiles, stages, first, second)),
            (_announce, (call, tiles, counter)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


@gluon.jit
def _announce(call, tiles, counter):
    """The work of the warp that finds tiles. It is ahead of all others, because memory may be slow to answer it.

    A program takes the next tile that none has taken, because groups have different numbers of rows.
    """
    narrow = gl.load(call.table)
    count = narrow * call.tiles(call.BOX) + (call.GROUPS - narrow) * call.tiles(call.COLUMNS)
    number = gl.program_id(0)
    turn = 0
    while number < count:
        index, row, column, is_narrow = call.tile(number, narrow)
        group = gl.load(call.table + 1 + 3 * index)
        start, end = gl.load(call.table + 2 + 3 * index), gl.load(call.table + 3 + 3 * index)
        number = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        # A tile has four numbers, of which two are pairs.
        tiles.put(turn, (group << 16) + row, start, end, column // call.BOX * 2 + is_narrow.to(gl.int32))
        turn += 1
    tiles.put(turn, DONE, 0, 0, 0)


@gluon.jit
def _fetch(call, tiles, stages, first, second):
    """The work of the warp that fetches: all tiles, in the order in which the other warps read them."""
    BYTES: gl.constexpr = 2 * first.block_type.nbytes + second.block_type.nbytes
    BOX: gl.constexpr = call.BOX
    step, turn = 0, 0
    group_and_row, start, end, column_and_width = tiles.get(turn, 1)
    while group_and_row != DONE:
        row = (group_and_row & 65535) * (2 * HALF)
        has_second_box = BOX < call.COLUMNS and (column_and_width & 1) == 0
        column = column_and_width // 2 * BOX
        for s in range(gl.cdiv(end - start, DEPTH)):
            stages.wait_until_empty(step)
            full = stages.full.index(step % stages.COUNT)
            if has_second_box:
                mbarrier.expect(full, BYTES + second.block_type.nbytes)
            else:
                mbarrier.expect(full, BYTES)
            for half in gl.static_range(2):
                tma.load(first, [start + s * DEPTH, row + half * HALF], full, stages.rows_of(step, half))
            tma.load(second, [start + s * DEPTH, column], full, call.box(stages.matrix_of(step), 0))
            if has_second_box:
                tma.load(second, [start + s * DEPTH, column + BOX], full, call.box(stages.matrix_of(step), 1))
            step += 1
        turn += 1
        group_and_row, start, end, column_and_width = tiles.get(turn, 1)


@gluon.jit
def _warp_group_0(call, tiles, stages, masked, out):
    _contract(0, call, tiles, stages, masked, out)


@gluon.jit
def _warp_group_1(call, tiles, stages, masked, out):
    _contract(1, call, tiles, stages, masked, out)


@gluon.jit
def _contract(WARP_GROUP: gl.constexpr, call, tiles, stages, masked, out):
    """The work of a group of four warps: half of the rows of each tile of the result."""
    step, masks, turn = 0, 0, 0
    group_and_row, start, end, column_and_width = tiles.get(turn, 4)
    while group_and_row != DONE:
        group, row = group_and_row >> 16, ((group_and_row & 65535) * 2 + WARP_GROUP) * HALF
        is_narrow = call.BOX == call.COLUMNS or (column_and_width & 1) == 1
        column = column_and_width // 2 * call.BOX  # so that it is known to be a multiple
        if is_narrow:
            step, masks = _compute(
                WARP_GROUP, call.BOX, call, stages, masked, out, step, masks, group, end - start, row, column
            )
        else:
            step, masks = _compute(
                WARP_GROUP, call.COLUMNS, call, stages, masked, out, step, masks, group, end - start, row, column
            )
        turn += 1
        group_and_row, start, end, column_and_width = tiles.get(turn, 4)


@gluon.jit
def _compute(
    WARP_GROUP: gl.constexpr, COLUMNS: gl.constexpr, call, stages, masked, out, step, masks, group, rows, row, column
):  # fmt: skip
    """Half of the rows of a tile of the result, of so many columns. Returns the next step, and how many were masked."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    total = gl.zeros([HALF, COLUMNS], gl.float32, ACC)
    if rows > 0:
        for s in range(gl.cdiv(rows, DEPTH)):
            stages.wait_until_full(step)
            left = rows - s * DEPTH
            if left < DEPTH:
                _clear(stages, step, left, WARP_GROUP, call.COLUMNS)
                mbarrier.arrive(masked.index(0))
                mbarrier.wait(masked.index(0), masks & 1)
                masks += 1
            tile = stages.matrix_of(step)
            if COLUMNS < call.COLUMNS:
                tile = tile.slice(0, COLUMNS, 1)
            total = warpgroup_mma(stages.rows_of(step, WARP_GROUP).permute((1, 0)), tile, total, is_async=True)
            total = warpgroup_mma_wait(1, [total])
            # The product of the step before has ended.
            if s > 0:
                stages.release(step - 1)
            step += 1
        total = warpgroup_mma_wait(0, [total])
        stages.release(step - 1)
    _store(call, out, total.to(out.dtype.element_ty), group, row, column)
    return step, masks


@gluon.jit
def _clear(stages, step, left, WARP_GROUP: gl.constexpr, COLUMNS: gl.constexpr):
    """Set the rows of other groups to zero: in the tile of this group of warps, and in half of the common one."""
    _clear_rows(stages.rows_of(step, WARP_GROUP), left)
    common = stages.matrix_of(step)
    _clear_rows(common.slice(WARP_GROUP * (COLUMNS // 2), COLUMNS // 2, 1), left)
    fence_async_shared()


@gluon.jit
def _clear_rows(tile, left):
    WIDTH: gl.constexpr = tile.shape[1]
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, ROWS))
    values = tile.load(ROWS)
    tile.store(gl.where((row < left)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _store(call, out, values, group, first, column):
    """Store a tile of the matrix of a group, in whole rows: they are faster than the pieces that a thread has."""
    COLUMNS: gl.constexpr = values.shape[1]
    # Eight numbers for each thread: of 16 bits, 16 bytes.
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    values = gl.convert_layout(values, ROWS)
    row = first + gl.arange(0, HALF, gl.SliceLayout(1, ROWS))
    place = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, ROWS))
    out += group.to(gl.int64) * (call.K * call.N)
    mask = (row < call.K)[:, None] & (place < call.N)[None, :]
    gl.store(out + (row.to(gl.int64)[:, None] * call.N + place[None, :]), values, mask=mask)
