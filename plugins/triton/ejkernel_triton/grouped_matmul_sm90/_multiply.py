"""The product of rows with the matrix of their group: one warp fetches tiles into shared memory, and two groups of four
warps multiply.

Each group has half of the rows of a tile of the result, and both read the same tiles of the matrix. Programs are
persistent: each takes one tile of the result after another, and the tiles of the next one are fetched while the results
of this one are stored.

Matrix products are asynchronous. Nothing may use the registers of a product before `warpgroup_mma_wait` returns them.
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

from ejkernel_triton.hopper import tma
from ejkernel_triton.hopper.shared_memory import barriers

LOG2E = gl.constexpr(1.4426950408889634)
#: Rows of each group of warps.
HALF = gl.constexpr(64)
#: The rows of a matrix that are multiplied at a time: 128 bytes.
DEPTH = gl.constexpr(64)


@aggregate
class Stages:
    """A ring of tiles that are multiplied together: of the rows for each group of warps, and of the matrix."""

    rows: gl.shared_memory_descriptor
    matrix: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    COUNT: gl.constexpr
    #: Tiles of the matrix in a stage: the gates and the values are apart, or together.
    PIECES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, rows, matrix, full, empty, COUNT, PIECES):
        self.rows = rows
        self.matrix = matrix
        self.full = full
        self.empty = empty
        self.COUNT = gl.constexpr(COUNT)
        self.PIECES = gl.constexpr(PIECES)

    @gluon.jit
    def wait_until_empty(self, step):
        mbarrier.wait(self.empty.index(step % self.COUNT), ((step // self.COUNT) & 1) ^ 1)

    @gluon.jit
    def wait_until_full(self, step):
        mbarrier.wait(self.full.index(step % self.COUNT), (step // self.COUNT) & 1)

    @gluon.jit
    def release(self, step):
        mbarrier.arrive(self.empty.index(step % self.COUNT))

    @gluon.jit
    def rows_of(self, step, WARP_GROUP: gl.constexpr):
        return self.rows.index(step % self.COUNT * 2 + WARP_GROUP)

    @gluon.jit
    def matrix_of(self, step, PIECE: gl.constexpr, TRANSPOSED: gl.constexpr):
        tile = self.matrix.index(step % self.COUNT * self.PIECES + PIECE)
        tile = tile.reshape([tile.shape[1], tile.shape[2]])
        if TRANSPOSED:
            tile = tile.permute((1, 0))
        return tile


@aggregate
class Call:
    """What all warps know of the call."""

    #: From the kernel before: how many tiles of rows there are, and of each its group, its first row and its end.
    table: gl.tensor
    #: The columns of the result, and of a tile of it.
    WIDTH: gl.constexpr
    COLUMNS: gl.constexpr
    #: How many steps a product has.
    STEPS: gl.constexpr
    TRANSPOSED: gl.constexpr
    #: None, or how the gates are arranged: "halves" or "pairs".
    GATES: gl.constexpr
    #: Tiles of rows that are neighbours in time, so that they find the same matrix in the L2.
    BAND: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, table, WIDTH, COLUMNS, STEPS, TRANSPOSED, GATES, BAND):
        self.table = table
        self.WIDTH = gl.constexpr(WIDTH)
        self.COLUMNS = gl.constexpr(COLUMNS)
        self.STEPS = gl.constexpr(STEPS)
        self.TRANSPOSED = gl.constexpr(TRANSPOSED)
        self.GATES = gl.constexpr(GATES)
        self.BAND = gl.constexpr(BAND)

    @gluon.jit
    def count(self):
        """The number of tiles of the result."""
        return gl.load(self.table) * gl.cdiv(self.WIDTH, self.COLUMNS)

    @gluon.jit
    def tile(self, number):
        """The group of a tile, its first row, the row where the group ends, and its first column."""
        columns: gl.constexpr = (self.WIDTH + self.COLUMNS - 1) // self.COLUMNS
        band = number // (self.BAND * columns)
        height = gl.minimum(gl.load(self.table) - band * self.BAND, self.BAND)
        place = number - band * (self.BAND * columns)
        entry = self.table + 4 * (1 + band * self.BAND + place % height)
        return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), place // height * self.COLUMNS


@gluon.jit
def multiply(
    lhs, rhs, table, bias,
    out,
    K: gl.constexpr, N: gl.constexpr, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr, BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    GATES: gl.constexpr = _gates(ACTIVATION)
    PIECES: gl.constexpr = 2 if GATES == "halves" else 1
    WIDTH: gl.constexpr = N if GATES is None else N // 2
    call = Call(table, WIDTH, COLUMNS, (K + DEPTH - 1) // DEPTH, TRANSPOSED, GATES, BAND)
    rows = gl.allocate_shared_memory(lhs.dtype, [2 * STAGES] + lhs.block_shape, lhs.layout)
    matrix = gl.allocate_shared_memory(rhs.dtype, [PIECES * STAGES] + rhs.block_shape, rhs.layout)
    stages = Stages(rows, matrix, barriers(STAGES, 1), barriers(STAGES, 2), STAGES, PIECES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_warp_group_0, (call, stages, bias, out, N, BIAS, ACTIVATION)),
            (_warp_group_1, (call, stages, bias, out, N, BIAS, ACTIVATION)),
            (_fetch, (call, stages, lhs, rhs)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.constexpr_function
def _gates(activation):
    return None if activation is None else "pairs" if activation == "swiglu_oai" else "halves"


@gluon.jit
def _fetch(call, stages, lhs, rhs):
    """The work of the warp that fetches: all tiles, in the order in which the other warps read them."""
    BYTES: gl.constexpr = 2 * lhs.block_type.nbytes + stages.PIECES * rhs.block_type.nbytes
    FACTOR: gl.constexpr = 2 if call.GATES == "pairs" else 1
    step = 0
    for number in range(gl.program_id(0), call.count(), gl.num_programs(0)):
        group, first, _, column = call.tile(number)
        if group >= 0:
            for s in range(call.STEPS):
                stages.wait_until_empty(step)
                full = stages.full.index(step % stages.COUNT)
                mbarrier.expect(full, BYTES)
                for half in gl.static_range(2):
                    tma.load(lhs, [first + half * HALF, s * DEPTH], full, stages.rows_of(step, half))
                for piece in gl.static_range(stages.PIECES):
                    tile = stages.matrix.index(step % stages.COUNT * stages.PIECES + piece)
                    n = column * FACTOR + piece * call.WIDTH
                    if call.TRANSPOSED:
                        tma.load(rhs, [group, n, s * DEPTH], full, tile)
                    else:
                        tma.load(rhs, [group, s * DEPTH, n], full, tile)
                step += 1


@gluon.jit
def _warp_group_0(call, stages, bias, out, N: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr):
    _multiply(0, call, stages, bias, out, N, BIAS, ACTIVATION)


@gluon.jit
def _warp_group_1(call, stages, bias, out, N: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr):
    _multiply(1, call, stages, bias, out, N, BIAS, ACTIVATION)


@gluon.jit
def _multiply(
    WARP_GROUP: gl.constexpr, call, stages, bias, out, N: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr
):  # fmt: skip
    """The work of a group of four warps: half of the rows of each tile."""
    PAIRS: gl.constexpr = call.GATES == "pairs"
    SIZE: gl.constexpr = 2 * call.COLUMNS if PAIRS else call.COLUMNS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    step = 0
    for number in range(gl.program_id(0), call.count(), gl.num_programs(0)):
        group, first, end, column = call.tile(number)
        first += WARP_GROUP * HALF
        total = gl.zeros([HALF, SIZE], gl.float32, ACC)
        up = total
        if group >= 0 and first >= end:
            # The last tile of a group may have no rows for this group of warps.
            for _ in range(call.STEPS):
                stages.wait_until_full(step)
                stages.release(step)
                step += 1
        elif group >= 0:
            for s in range(call.STEPS):
                stages.wait_until_full(step)
                rows = stages.rows_of(step, WARP_GROUP)
                total = warpgroup_mma(rows, stages.matrix_of(step, 0, call.TRANSPOSED), total, is_async=True)
                if call.GATES == "halves":
                    up = warpgroup_mma(rows, stages.matrix_of(step, 1, call.TRANSPOSED), up, is_async=True)
                    total, up = warpgroup_mma_wait(2, [total, up])
                else:
                    total = warpgroup_mma_wait(1, [total])
                # The products of the step before have ended.
                if s > 0:
                    stages.release(step - 1)
                step += 1
            if call.GATES == "halves":
                total, up = warpgroup_mma_wait(0, [total, up])
            else:
                total = warpgroup_mma_wait(0, [total])
            stages.release(step - 1)
            if BIAS:
                places = column * (2 if PAIRS else 1) + gl.arange(0, SIZE, gl.SliceLayout(0, ACC))
                total += gl.load(bias + group * N + places, mask=places < N, other=0).to(gl.float32)[None, :]
                if call.GATES == "halves":
                    places += call.WIDTH
                    up += gl.load(bias + group * N + places, mask=places < N, other=0).to(gl.float32)[None, :]
        if PAIRS:
            total, up = gl.split(total.reshape([HALF, call.COLUMNS, 2]))
        if ACTIVATION is not None:
            total = _activated(total, up, ACTIVATION)
        _store(call, out, total.to(out.dtype.element_ty), first, end, column)


@gluon.jit
def _activated(gate, up, ACTIVATION: gl.constexpr):
    if ACTIVATION == "silu_gated":
        result = gate * _sigmoid(gate) * up
    elif ACTIVATION == "gelu_gated":
        # The tanh is -1 where that of the definition is, so that the result is 0 there.
        tanh = 2 * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) - 1
        result = 0.5 * gate * (1 + tanh) * up
    else:
        # By comparisons, which keep what is no number.
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
    # Eight numbers, or 16 bytes, for each thread.
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // call.COLUMNS, call.COLUMNS // 8], [4, 1], [1, 0])
    values = gl.convert_layout(values, ROWS)
    row = first + gl.arange(0, HALF, gl.SliceLayout(1, ROWS))
    place = column + gl.arange(0, call.COLUMNS, gl.SliceLayout(0, ROWS))
    places = row.to(gl.int64)[:, None] * call.WIDTH + place[None, :]
    gl.store(out + places, values, mask=(row < end)[:, None] & (place < call.WIDTH)[None, :])
