"""What warps tell each other: which tile of the result comes next, and where the tiles of its operands are."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from ejkernel_triton.gluon.shared_memory import barriers
from ejkernel_triton.grouped_matmul_sm90 import _tiling

HALF = gl.constexpr(_tiling.HALF)
DEPTH = gl.constexpr(_tiling.DEPTH)
#: How many tiles of the result may be announced at a time.
SLOTS = gl.constexpr(2)
#: In place of the first number of a tile, which is -1 or more: there are no more tiles.
DONE = gl.constexpr(-2)


@aggregate
class Stages:
    """A ring of tiles that are multiplied together: of the rows for each group of warps, and of the matrix."""

    rows: gl.shared_memory_descriptor
    matrix: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    COUNT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, rows, matrix, full, empty, COUNT):
        self.rows = rows
        self.matrix = matrix
        self.full = full
        self.empty = empty
        self.COUNT = gl.constexpr(COUNT)

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
    def matrix_of(self, step):
        return self.matrix.index(step % self.COUNT)


@aggregate
class Queue:
    """The tiles of the result that this program computes, each as four numbers."""

    numbers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, numbers, full, empty):
        self.numbers = numbers
        self.full = full
        self.empty = empty

    @gluon.jit
    def put(self, turn, first, second, third, fourth):
        mbarrier.wait(self.empty.index(turn % SLOTS), ((turn // SLOTS) & 1) ^ 1)
        self._store(turn, 0, first)
        self._store(turn, 1, second)
        self._store(turn, 2, third)
        self._store(turn, 3, fourth)
        mbarrier.arrive(self.full.index(turn % SLOTS))

    @gluon.jit
    def get(self, turn, WARPS: gl.constexpr):
        mbarrier.wait(self.full.index(turn % SLOTS), (turn // SLOTS) & 1)
        first, second = self._load(turn, 0, WARPS), self._load(turn, 1, WARPS)
        third, fourth = self._load(turn, 2, WARPS), self._load(turn, 3, WARPS)
        mbarrier.arrive(self.empty.index(turn % SLOTS))
        return first, second, third, fourth

    @gluon.jit
    def _store(self, turn, PLACE: gl.constexpr, number):
        ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        self.numbers.index(turn % SLOTS * 4 + PLACE).store(gl.full([1], number, gl.int32, ONE))

    @gluon.jit
    def _load(self, turn, PLACE: gl.constexpr, WARPS: gl.constexpr):
        ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        return gl.max(self.numbers.index(turn % SLOTS * 4 + PLACE).load(ONE), 0)


@gluon.jit
def queue():
    numbers = gl.allocate_shared_memory(gl.int32, [4 * SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Queue(numbers, barriers(SLOTS, 1), barriers(SLOTS, 3))
