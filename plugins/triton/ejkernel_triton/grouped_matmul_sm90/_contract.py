"""The rows of two arrays, contracted within each group: one warp fetches tiles into shared memory, and two groups of
four warps multiply, each for half of the rows of a tile of the result.

Programs are persistent, and begin with the largest groups. The last tile of a group has rows of the next one, too. They
are set to zero in shared memory, in both operands: what stands there may be infinite.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from ejkernel_triton.grouped_matmul_sm90._multiply import DEPTH, HALF, Stages
from ejkernel_triton.hopper import tma
from ejkernel_triton.hopper.shared_memory import barriers


@aggregate
class Call:
    """What all warps know of the call."""

    boundaries: gl.tensor
    #: The groups, those with the most rows first.
    order: gl.tensor
    GROUPS: gl.constexpr
    #: The sizes of a matrix, and the columns of a tile of it.
    K: gl.constexpr
    N: gl.constexpr
    COLUMNS: gl.constexpr
    #: Tiles of rows that are neighbours in time, so that they find the same columns in the L2.
    BAND: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, boundaries, order, GROUPS, K, N, COLUMNS, BAND):
        self.boundaries = boundaries
        self.order = order
        self.GROUPS = gl.constexpr(GROUPS)
        self.K = gl.constexpr(K)
        self.N = gl.constexpr(N)
        self.COLUMNS = gl.constexpr(COLUMNS)
        self.BAND = gl.constexpr(BAND)

    @gluon.jit
    def count(self):
        """The number of tiles of the result."""
        return self.GROUPS * gl.cdiv(self.K, 2 * HALF) * gl.cdiv(self.N, self.COLUMNS)

    @gluon.jit
    def tile(self, number):
        """The group of a tile, the rows where that begins and ends, and the place of the tile in the matrix."""
        heights: gl.constexpr = (self.K + 2 * HALF - 1) // (2 * HALF)
        columns: gl.constexpr = (self.N + self.COLUMNS - 1) // self.COLUMNS
        group = gl.load(self.order + number // (heights * columns))
        place = number % (heights * columns)
        band = place // (self.BAND * columns)
        height = gl.minimum(heights - band * self.BAND, self.BAND)
        place -= band * (self.BAND * columns)
        row = (band * self.BAND + place % height) * (2 * HALF)
        start, end = gl.load(self.boundaries + group), gl.load(self.boundaries + group + 1)
        return group, start, end, row, place // height * self.COLUMNS


@gluon.jit
def contract(
    first, second, boundaries, order,
    out,
    GROUPS: gl.constexpr, K: gl.constexpr, N: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr,
):  # fmt: skip
    call = Call(boundaries, order, GROUPS, K, N, COLUMNS, BAND)
    rows = gl.allocate_shared_memory(first.dtype, [2 * STAGES] + first.block_shape, first.layout)
    matrix = gl.allocate_shared_memory(second.dtype, [STAGES] + second.block_shape, second.layout)
    stages = Stages(rows, matrix, barriers(STAGES, 1), barriers(STAGES, 2), STAGES, 1)
    masked = barriers(1, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_warp_group_0, (call, stages, masked, out)),
            (_warp_group_1, (call, stages, masked, out)),
            (_fetch, (call, stages, first, second)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _fetch(call, stages, first, second):
    """The work of the warp that fetches: all tiles, in the order in which the other warps read them."""
    BYTES: gl.constexpr = 2 * first.block_type.nbytes + second.block_type.nbytes
    step = 0
    for number in range(gl.program_id(0), call.count(), gl.num_programs(0)):
        _, start, end, row, column = call.tile(number)
        for s in range(gl.cdiv(end - start, DEPTH)):
            stages.wait_until_empty(step)
            full = stages.full.index(step % stages.COUNT)
            mbarrier.expect(full, BYTES)
            for half in gl.static_range(2):
                tma.load(first, [start + s * DEPTH, row + half * HALF], full, stages.rows_of(step, half))
            tma.load(second, [start + s * DEPTH, column], full, stages.matrix.index(step % stages.COUNT))
            step += 1


@gluon.jit
def _warp_group_0(call, stages, masked, out):
    _contract(0, call, stages, masked, out)


@gluon.jit
def _warp_group_1(call, stages, masked, out):
    _contract(1, call, stages, masked, out)


@gluon.jit
def _contract(WARP_GROUP: gl.constexpr, call, stages, masked, out):
    """The work of a group of four warps: half of the rows of each tile of the result."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.COLUMNS, 16])
    step, masks = 0, 0
    for number in range(gl.program_id(0), call.count(), gl.num_programs(0)):
        group, start, end, row, column = call.tile(number)
        total = gl.zeros([HALF, call.COLUMNS], gl.float32, ACC)
        steps = gl.cdiv(end - start, DEPTH)
        if steps > 0:
            for s in range(steps):
                stages.wait_until_full(step)
                left = end - start - s * DEPTH
                if left < DEPTH:
                    _clear(stages, step, left, WARP_GROUP, call.COLUMNS)
                    mbarrier.arrive(masked.index(0))
                    mbarrier.wait(masked.index(0), masks & 1)
                    masks += 1
                rows = stages.rows_of(step, WARP_GROUP).permute((1, 0))
                total = warpgroup_mma(rows, stages.matrix.index(step % stages.COUNT), total, is_async=True)
                total = warpgroup_mma_wait(1, [total])
                # The product of the step before has ended.
                if s > 0:
                    stages.release(step - 1)
                step += 1
            total = warpgroup_mma_wait(0, [total])
            stages.release(step - 1)
        _store(call, out, total.to(out.dtype.element_ty), group, row + WARP_GROUP * HALF, column)


@gluon.jit
def _clear(stages, step, left, WARP_GROUP: gl.constexpr, COLUMNS: gl.constexpr):
    """Set the rows of other groups to zero: in the tile of this group of warps, and in half of the common one."""
    _clear_rows(stages.rows_of(step, WARP_GROUP), left)
    common = stages.matrix.index(step % stages.COUNT)
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
    # Eight numbers, or 16 bytes, for each thread.
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // call.COLUMNS, call.COLUMNS // 8], [4, 1], [1, 0])
    values = gl.convert_layout(values, ROWS)
    row = first + gl.arange(0, HALF, gl.SliceLayout(1, ROWS))
    place = column + gl.arange(0, call.COLUMNS, gl.SliceLayout(0, ROWS))
    out += group.to(gl.int64) * (call.K * call.N)
    mask = (row < call.K)[:, None] & (place < call.N)[None, :]
    gl.store(out + (row.to(gl.int64)[:, None] * call.N + place[None, :]), values, mask=mask)
