"""The decode kernel for Hopper of keys and values in arrays: which parts a program has, and how they are fetched."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from ejkernel_triton.flash_attention_decode._device import blocks_of_split, place_of, seen_keys
from ejkernel_triton.gluon import tma
from ejkernel_triton.split_keys import attend as programs
from ejkernel_triton.split_keys.steps import Results, allocate_steps


@aggregate
class Part:
    """The keys of a split of a row of the batch and a key head, for one tile of queries or two."""

    batch: gl.tensor
    kv_head: gl.tensor
    #: The first of the tiles.
    tile: gl.tensor
    split: gl.tensor
    #: The position of the first query.
    q_start: gl.tensor
    #: Where blocks begin, and the slot behind the last key that is seen.
    origin: gl.tensor
    end: gl.tensor
    #: The first block of the part, and the one behind its last.
    block: gl.tensor
    stop: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, kv_head, tile, split, q_start, origin, end, block, stop):
        self.batch = batch
        self.kv_head = kv_head
        self.tile = tile
        self.split = split
        self.q_start = q_start
        self.origin = origin
        self.end = end
        self.block = block
        self.stop = stop


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
    #: The sums that are stored for each row, and the keys of each if their number is fixed.
    ENTRIES: gl.constexpr
    PART_SIZE: gl.constexpr
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
        self.ENTRIES = gl.constexpr(SPLITS)
        self.PART_SIZE = gl.constexpr(0)
        self.BLOCK = gl.constexpr(BLOCK)
        self.WARPS = gl.constexpr(WARPS)

    @gluon.jit
    def part(self, number):
        tile, kv_head, split, batch = place_of(number, self.HEADS // self.GROUP, self.TILES, self.SPLITS)
        q_start, first, end = seen_keys(
            self.q_starts, self.kv_lengths, self.k_length, batch, self.QUERIES, self.LEFT, self.RIGHT, self.STARTS,
            self.LENGTHS, False,
        )  # fmt: skip
        block, stop = blocks_of_split(first, end, split, self.SPLITS, self.BLOCK)
        return Part(batch, kv_head, tile * self.TOGETHER, split, q_start, first, end, block, stop)

    @gluon.jit
    def rows(self, part, OWN: gl.constexpr, layout: gl.constexpr):
        """The rows of a tile: which query and head each is, its place among all of them, and whether there is one."""
        row = (part.tile + OWN) * self.ROWS + gl.arange(0, self.ROWS, layout)
        head = part.kv_head * self.GROUP + row % self.GROUP
        query = row // self.GROUP
        return query, head, (part.batch * self.QUERIES + query) * self.HEADS + head, row < self.QUERIES * self.GROUP

    @gluon.jit
    def place_of_lse(self, place, head, query):
        batch = place // (self.QUERIES * self.HEADS)
        return (batch * self.HEADS + head) * self.QUERIES + query

    @gluon.jit
    def clear_other_rows(self, results, OWN: gl.constexpr, part, sums):
        """Each row is one of a tile."""

    @gluon.jit
    def seen_by_all(self, part):
        """Where the keys that all queries see begin and end."""
        full, full_end = part.origin, part.end
        if self.QUERIES > 1 and self.LEFT >= 0:
            full = gl.maximum(part.origin, part.q_start + (self.QUERIES - 1 - self.LEFT))
        if self.QUERIES > 1 and self.RIGHT >= 0:
            full_end = gl.minimum(part.end, part.q_start + (self.RIGHT + 1))
        return full, full_end

    @gluon.jit
    def begin(self, part, slot):
        """Of the slots from ``slot`` on, how many come before those that are seen: blocks begin there."""
        return 0

    @gluon.jit
    def visible(self, visible, position, end, q_position):
        """Without the keys that a query does not see."""
        visible = visible & (position < end)
        if self.QUERIES > 1 and self.LEFT >= 0:
            visible = visible & (position >= q_position - self.LEFT)
        if self.QUERIES > 1 and self.RIGHT >= 0:
            visible = visible & (position <= q_position + self.RIGHT)
        return visible

    @gluon.jit
    def fetch(self, steps, step, key, value, part):
        """Fetch the blocks of a part, each as soon as there is a place for it; the step behind them."""
        batch = part.batch.to(gl.int32)
        for j in range(part.block, part.stop):
            keys, values, keys_full, values_full = steps.wait_for_place(step)
            slot = part.origin + j * self.BLOCK
            mbarrier.expect(keys_full, key.block_type.nbytes)
            tma.load(key, [batch, slot, part.kv_head, 0], keys_full, keys)
            mbarrier.expect(values_full, value.block_type.nbytes)
            tma.load(value, [batch, slot, part.kv_head, 0], values_full, values)
            step += 1
        return step


@gluon.jit
def attend(
    query, key, value, q_starts, kv_lengths, sinks,
    k_length,
    out, maxima, totals,
    PARTS: gl.constexpr, QUERIES: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
    V_DIM: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    STARTS: gl.constexpr, LENGTHS: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, ROWS: gl.constexpr,
    TOGETHER: gl.constexpr, TILES: gl.constexpr, SPLITS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The results are those of the portable kernel's ``attend``."""
    # Triton makes a constant of what is 1.
    call = Call(
        q_starts, kv_lengths, gl.to_tensor(k_length), PARTS, QUERIES, HEADS, GROUP, LEFT, RIGHT, STARTS, LENGTHS, ROWS,
        TOGETHER, TILES, SPLITS, BLOCK, WARPS,
    )  # fmt: skip
    steps = allocate_steps(key, value, BLOCK, STAGES, TOGETHER)
    results = Results(out, maxima, totals, sinks, LSE, SINKS, V_DIM)
    fence_async_shared()
    programs.attend(call, steps, key, value, query, results, DIM, SCALE, CAP)
