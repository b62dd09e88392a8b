"""What the warps of a program share: which part of the keys it takes, the ring of blocks, and the arrays of results."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from ejkernel_triton.flash_attention_decode._device import blocks_of_split, place_of, seen_keys
from ejkernel_triton.hopper import tma
from ejkernel_triton.hopper.shared_memory import barriers


@aggregate
class Call:
    """What all warps know of the call."""

    q_starts: gl.tensor
    kv_lengths: gl.tensor
    k_length: gl.tensor
    #: How many parts all programs have to take.
    PARTS: gl.constexpr
    QUERIES: gl.constexpr
    HEADS: gl.constexpr
    GROUP: gl.constexpr
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    STARTS: gl.constexpr
    LENGTHS: gl.constexpr
    #: The rows of a tile, queries of all heads of a key head; how many tiles read the same blocks of a ring; and how
    #: many such sets of tiles a key head has.
    ROWS: gl.constexpr
    TOGETHER: gl.constexpr
    TILES: gl.constexpr
    SPLITS: gl.constexpr
    BLOCK: gl.constexpr
    WARPS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, q_starts, kv_lengths, k_length, PARTS, QUERIES, HEADS, GROUP, LEFT, RIGHT, STARTS, LENGTHS, ROWS,
        TOGETHER, TILES, SPLITS, BLOCK, WARPS,
    ):  # fmt: skip
        self.q_starts = q_starts
        self.kv_lengths = kv_lengths
        self.k_length = k_length
        self.PARTS = gl.constexpr(PARTS)
        self.QUERIES = gl.constexpr(QUERIES)
        self.HEADS = gl.constexpr(HEADS)
        self.GROUP = gl.constexpr(GROUP)
        self.LEFT = gl.constexpr(LEFT)
        self.RIGHT = gl.constexpr(RIGHT)
        self.STARTS = gl.constexpr(STARTS)
        self.LENGTHS = gl.constexpr(LENGTHS)
        self.ROWS = gl.constexpr(ROWS)
        self.TOGETHER = gl.constexpr(TOGETHER)
        self.TILES = gl.constexpr(TILES)
        self.SPLITS = gl.constexpr(SPLITS)
        self.BLOCK = gl.constexpr(BLOCK)
        self.WARPS = gl.constexpr(WARPS)

    @gluon.jit
    def part(self, number):
        """The batch, the key head and the first tile of a part, its number among those of its keys, and which keys
        these are: the position of the first query, the first slot, and the slot behind the last one.
        """
        tile, kv_head, split, batch = place_of(number, self.HEADS // self.GROUP, self.TILES, self.SPLITS)
        q_start, first, end = seen_keys(
            self.q_starts, self.kv_lengths, self.k_length, batch, self.QUERIES, self.LEFT, self.RIGHT, self.STARTS,
            self.LENGTHS, False,
        )  # fmt: skip
        block, stop = blocks_of_split(first, end, split, self.SPLITS, self.BLOCK)
        return batch, kv_head, tile * self.TOGETHER, split, q_start, first, end, block, stop

    @gluon.jit
    def rows(self, batch, kv_head, tile, layout: gl.constexpr):
        """The rows of a tile: which query and head each is, its place among all of them, and whether there is one."""
        row = tile * self.ROWS + gl.arange(0, self.ROWS, layout)
        head = kv_head * self.GROUP + row % self.GROUP
        query = row // self.GROUP
        return query, head, (batch * self.QUERIES + query) * self.HEADS + head, row < self.QUERIES * self.GROUP


@aggregate
class Steps:
    """A ring of blocks of keys and their values, which one warp fills and groups of warps read."""

    keys: gl.shared_memory_descriptor
    values: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor
    values_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    COUNT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, keys, values, keys_full, values_full, empty, COUNT):
        self.keys = keys
        self.values = values
        self.keys_full = keys_full
        self.values_full = values_full
        self.empty = empty
        self.COUNT = gl.constexpr(COUNT)

    @gluon.jit
    def fill(self, step, key, value, batch, slot, kv_head):
        """Fetch the blocks of a step as soon as its place is empty."""
        place = step % self.COUNT
        mbarrier.wait(self.empty.index(place), ((step // self.COUNT) & 1) ^ 1)
        keys_full, values_full = self.keys_full.index(place), self.values_full.index(place)
        mbarrier.expect(keys_full, key.block_type.nbytes)
        tma.load(key, [batch, slot, kv_head, 0], keys_full, self.keys.index(place))
        mbarrier.expect(values_full, value.block_type.nbytes)
        tma.load(value, [batch, slot, kv_head, 0], values_full, self.values.index(place))

    @gluon.jit
    def wait_for_keys(self, step):
        """The keys of a step, when they are there: (slots, columns)."""
        mbarrier.wait(self.keys_full.index(step % self.COUNT), (step // self.COUNT) & 1)
        return self.keys.index(step % self.COUNT).reshape([self.keys.shape[2], self.keys.shape[4]])

    @gluon.jit
    def wait_for_values(self, step):
        mbarrier.wait(self.values_full.index(step % self.COUNT), (step // self.COUNT) & 1)
        return self.values.index(step % self.COUNT).reshape([self.values.shape[2], self.values.shape[4]])

    @gluon.jit
    def release(self, step):
        """Give the place of a step back, whose blocks have been read."""
        mbarrier.arrive(self.empty.index(step % self.COUNT))


@gluon.jit
def allocate_steps(key, value, COUNT: gl.constexpr, READERS: gl.constexpr):
    """An empty ring of ``COUNT`` steps."""
    keys = gl.allocate_shared_memory(key.dtype, [COUNT] + key.block_shape, key.layout)
    values = gl.allocate_shared_memory(value.dtype, [COUNT] + value.block_shape, value.layout)
    return Steps(keys, values, barriers(COUNT, 1), barriers(COUNT, 1), barriers(COUNT, READERS), COUNT)


@aggregate
class Results:
    """The arrays of results, as those of the portable kernel: with several splits the sums of each, and else the output
    and the log-sum-exp.
    """

    out: gl.tensor
    maxima: gl.tensor
    totals: gl.tensor
    sinks: gl.tensor
    LSE: gl.constexpr
    SINKS: gl.constexpr
    V_DIM: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, out, maxima, totals, sinks, LSE, SINKS, V_DIM):
        self.out = out
        self.maxima = maxima
        self.totals = totals
        self.sinks = sinks
        self.LSE = gl.constexpr(LSE)
        self.SINKS = gl.constexpr(SINKS)
        self.V_DIM = gl.constexpr(V_DIM)
