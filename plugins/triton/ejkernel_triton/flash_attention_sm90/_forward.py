"""The forward pass: warps of three kinds, that meet in shared memory.

One warp fetches tiles. Two groups of four warps each take half of the queries of a tile. Within a group the product
with the values of one block runs beside the softmax of the next, and so the last of a tile beside the first of the
next tile; while one group is at its softmax, the other multiplies. Programs stay on their multiprocessors and take one
tile of queries after another.

Matrix units write their results behind the program's back. Between a product and the wait for it nothing may touch its
registers: `warpgroup_mma_wait` is where they become numbers.
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

from ejkernel_triton.flash_attention_sm90 import _tma
from ejkernel_triton.flash_attention_sm90._shared import (
    LOG2E,
    Call,
    Own,
    barriers,
    bent,
    bent_weights,
    own_tokens,
    ring,
    seen,
    store_rows,
)

#: Queries of a tile: 64 for each of two groups of warps.
Q_BLOCK = gl.constexpr(128)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-3.4028234663852886e38)
#: In units of log2, how far from 0 logits may be whose weights bfloat16 holds as they are. That leaves 2 ** 48 for
#: values and for how many are summed up in float32.
FAR = gl.constexpr(80)


@aggregate
class Blocks:
    """Blocks of keys and values, for one step after another. A step multiplies by its keys, and sums up its values:
    those of the block before. So the first step of a program has no values, and its last no keys.
    """

    keys: gl.shared_memory_descriptor
    values: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor
    values_full: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor
    COUNT: gl.constexpr
    ROWS: gl.constexpr
    WIDTH: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, keys, values, keys_full, values_full, done, COUNT, ROWS, WIDTH):
        self.keys = keys
        self.values = values
        self.keys_full = keys_full
        self.values_full = values_full
        self.done = done
        self.COUNT = gl.constexpr(COUNT)
        self.ROWS = gl.constexpr(ROWS)
        self.WIDTH = gl.constexpr(WIDTH)

    @gluon.jit
    def fill(self, step, key, value, k_batch, k_head, k_row, v_batch, v_head, v_row):
        """Rows below 0 are those of no block."""
        place = step % self.COUNT
        mbarrier.wait(self.done.index(place), ((step // self.COUNT) & 1) ^ 1)
        _fill(self.keys_full.index(place), key, k_batch, k_head, k_row, self.keys.index(place))
        _fill(self.values_full.index(place), value, v_batch, v_head, v_row, self.values.index(place))

    @gluon.jit
    def wait_for_keys(self, step):
        mbarrier.wait(self.keys_full.index(step % self.COUNT), (step // self.COUNT) & 1)

    @gluon.jit
    def wait_for_values(self, step):
        mbarrier.wait(self.values_full.index(step % self.COUNT), (step // self.COUNT) & 1)

    @gluon.jit
    def keys_of(self, step):
        return self.keys.index(step % self.COUNT).reshape([self.ROWS, self.WIDTH])

    @gluon.jit
    def values_of(self, step):
        return self.values.index(step % self.COUNT).reshape([self.ROWS, self.WIDTH])

    @gluon.jit
    def release(self, step):
        """The step is done."""
        mbarrier.arrive(self.done.index(step % self.COUNT))


@gluon.jit
def _fill(full, desc, batch, head, row, tile):
    if row >= 0:
        mbarrier.expect(full, desc.block_type.nbytes)
        _tma.load(desc, [batch, row, head, 0], full, tile)
    else:
        mbarrier.arrive(full)


@gluon.jit
def _blocks(desc, COUNT: gl.constexpr):
    keys = gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_shape, desc.layout)
    values = gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_shape, desc.layout)
    full = barriers(COUNT, 1), barriers(COUNT, 1)
    return Blocks(keys, values, full[0], full[1], barriers(COUNT, 2), COUNT, desc.block_shape[1], desc.block_shape[3])


@aggregate
class Results:
    """Where they go, and the sinks that take part."""

    out: gl.tensor
    lse: gl.tensor
    sinks: gl.tensor
    DIM: gl.constexpr
    SINKS: gl.constexpr
    SINK_WIDTH: gl.constexpr
    #: No weight needs the greatest logit to be held: a soft cap bounds them all.
    BOUNDED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, out, lse, sinks, DIM, SINKS, SINK_WIDTH, BOUNDED):
        self.out = out
        self.lse = lse
        self.sinks = sinks
        self.DIM = gl.constexpr(DIM)
        self.SINKS = gl.constexpr(SINKS)
        self.SINK_WIDTH = gl.constexpr(SINK_WIDTH)
        self.BOUNDED = gl.constexpr(BOUNDED)


@aggregate
class Softmax:
    """That of the rows so far: the greatest logit, the sum of the weights, in eight parts, that of the weighted values,
    and the weights of the last block, whose values are still to come.
    """

    top: gl.tensor
    total: gl.tensor
    sums: gl.tensor
    weights: gl.tensor

    @gluon.constexpr_function
    def __init__(self, top, total, sums, weights):
        self.top = top
        self.total = total
        self.sums = sums
        self.weights = weights


@gluon.jit
def attend(
    query, key, value, schedule, sight, starts, stops, q_ids, k_ids, sinks,
    q_length, k_length, schedule_width, sight_batch,
    out, lse,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr, SCALE: gl.constexpr,
    CAP: gl.constexpr, BEFORE: gl.constexpr, AFTER: gl.constexpr, PACKED: gl.constexpr, SEGMENTS: gl.constexpr,
    SINKS: gl.constexpr, SINK_WIDTH: gl.constexpr, K_BLOCK: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """(batch, length, heads, dim) in and out; the log-sum-exp is (batch, heads, length)."""
    call = Call(
        # Triton makes a constant of what is 1.
        gl.to_tensor(q_length), gl.to_tensor(k_length), schedule, gl.to_tensor(schedule_width),
        sight, gl.to_tensor(sight_batch), starts, stops, q_ids, k_ids, HEADS, SCALE, CAP, BEFORE, AFTER, PACKED,
        SEGMENTS, True, WIDTH, Q_BLOCK, K_BLOCK,
    )  # fmt: skip
    # Nothing bounds sinks.
    CAPPED: gl.constexpr = CAP > 0 and CAP * LOG2E <= FAR
    BOUNDED: gl.constexpr = CAPPED and SINKS == 0 and out.dtype.element_ty == gl.bfloat16
    results = Results(out, lse, sinks, DIM, SINKS, SINK_WIDTH, BOUNDED)
    queries_0 = ring(query, TILES, 1)
    queries_1 = ring(query, TILES, 1)
    blocks = _blocks(key, STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_part_0, (call, queries_0, blocks, results)),
            (_part_1, (call, queries_1, blocks, results)),
            (_fetch, (call, queries_0, queries_1, blocks, query, key, value, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _fetch(call, queries_0, queries_1, blocks, query, key, value, GROUP: gl.constexpr):
    """One warp: everything that the others need, in the order in which they need it."""
    step = 0
    v_batch, v_head, v_row = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(-1)
    for turn in range(call.turns()):
        batch, head, block = call.tile(turn)
        first, _, _, end = call.blocks_seen(batch, block)
        kv_head = head // GROUP
        for i in range(end - first):
            k_row = (end - 1 - i) * call.OTHER_BLOCK
            blocks.fill(step, key, value, batch, kv_head, k_row, v_batch, v_head, v_row)
            if i == 0:
                row = block * call.OWN_BLOCK
                queries_0.fill(turn, query, [batch, row, head, 0])
                queries_1.fill(turn, query, [batch, row + 64, head, 0])
            v_batch, v_head, v_row = batch, kv_head, k_row
            step += 1
    blocks.fill(step, key, value, v_batch, v_head, -1, v_batch, v_head, v_row)


@gluon.jit
def _part_0(call, queries, blocks, results):
    _attend(0, call, queries, blocks, results)


@gluon.jit
def _part_1(call, queries, blocks, results):
    _attend(1, call, queries, blocks, results)


@aggregate
class Tile:
    """The queries that a group works on at a time, and the blocks of keys that they see, from the last to the first."""

    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor
    first: gl.tensor
    whole: gl.tensor
    whole_end: gl.tensor
    end: gl.tensor
    own: Own

    @gluon.constexpr_function
    def __init__(self, batch, head, row, first, whole, whole_end, end, own):
        self.batch = batch
        self.head = head
        self.row = row
        self.first = first
        self.whole = whole
        self.whole_end = whole_end
        self.end = end
        self.own = own


@gluon.jit
def _tile(call, turn, ME: gl.constexpr, ROWS: gl.constexpr):
    batch, head, block = call.tile(turn)
    first, whole, whole_end, end = call.blocks_seen(batch, block)
    row = block * call.OWN_BLOCK + ME * 64
    own = own_tokens(call, batch, row, 64, ROWS)
    return Tile(batch, head, row, first, whole, whole_end, end, own)


@gluon.jit
def _attend(ME: gl.constexpr, call, queries, blocks, results):
    """Four warps: 64 of the queries of each tile."""
    WIDTH: gl.constexpr = call.WIDTH
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.OTHER_BLOCK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    count = call.turns()
    tile = _tile(call, 0, ME, ROWS)
    queries.wait(0)
    blocks.wait_for_keys(0)
    product = _times_keys(queries, 0, blocks, 0, S)
    top, total, weights = _begin(call, results, tile, warpgroup_mma_wait(0, [product]))
    state = _begun(top, total, weights, WIDTH, OUT, queries.tiles.dtype)
    blocks.release(0)
    blocks.wait_for_keys(1)
    begin = 1
    for turn in range(count):
        # The step of the tile's last sums. It is also what comes after the loop: Triton 3.6 takes what is carried from
        # tile to tile for dead if nothing but the bounds of an inner loop need it, and leaves it at what it was first.
        last = begin + (tile.end - 1 - tile.first)
        j = tile.end - 2
        for step in range(begin, last):
            state = _meet(call, queries, turn, blocks, results, state, step, tile, j)
            j -= 1
        # The first logits of the next tile, beside the last sums of this one.
        following = _tile(call, gl.minimum(turn + 1, count - 1), ME, ROWS)
        top, total = state.top, state.total
        next_top, next_total, weights = top, total, gl.zeros([64, call.OTHER_BLOCK], gl.float32, S)
        if queries.COUNT > 1:
            if turn + 1 < count:
                queries.wait(turn + 1)
                product = _times_keys(queries, turn + 1, blocks, last, S)
                summing = _times_values(state, blocks, last)
                logits = warpgroup_mma_wait(1, [product])
                next_top, next_total, weights = _begin(call, results, following, logits)
                blocks.wait_for_keys(last + 1)
                sums = warpgroup_mma_wait(0, [summing])
            else:
                sums = warpgroup_mma_wait(0, [_times_values(state, blocks, last)])
            _finish(call, queries, turn, results, tile, top, total, sums)
        else:
            sums = warpgroup_mma_wait(0, [_times_values(state, blocks, last)])
            _finish(call, queries, turn, results, tile, top, total, sums)
            if turn + 1 < count:
                queries.wait(turn + 1)
                product = _times_keys(queries, turn + 1, blocks, last, S)
                logits = warpgroup_mma_wait(0, [product])
                next_top, next_total, weights = _begin(call, results, following, logits)
                blocks.wait_for_keys(last + 1)
        state = _begun(next_top, next_total, weights, WIDTH, OUT, queries.tiles.dtype)
        blocks.release(last)
        begin = last + 1
        tile = following


@gluon.jit
def _begin(call, results, tile, logits):
    """The softmax of the sinks and of a tile's first block."""
    S: gl.constexpr = logits.type.layout
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    top = gl.full([64], 0.0 if results.BOUNDED else LOWEST, gl.float32, ROWS)
    total = _in_parts(gl.zeros([64, call.OTHER_BLOCK], gl.float32, S))
    if results.SINKS > 0:
        at = gl.arange(0, results.SINK_WIDTH, gl.BlockedLayout([1], [32], [4], [0]))
        sink = gl.load(results.sinks + tile.head * results.SINKS + at, mask=at < results.SINKS, other=-float("inf"))
        sink = sink.to(gl.float32)
        greatest = gl.maximum(gl.max(sink, 0), LOWEST / 2)
        top = gl.zeros([64], gl.float32, ROWS) + greatest * LOG2E
        # The difference first: of a product and a number, of which one is the other rounded, little may be much.
        total += gl.sum(gl.exp2((sink - greatest) * LOG2E), 0) / total.shape[1]
    top, _, total, weights = _weigh(call, results, tile, tile.end - 1, logits, top, total)
    return top, total, weights


@gluon.jit
def _begun(top, total, weights, WIDTH: gl.constexpr, OUT: gl.constexpr, dtype: gl.constexpr):
    sums = gl.zeros([64, WIDTH], gl.float32, OUT)
    return Softmax(top, total, sums, gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, OUT, 2)))


@gluon.jit
def _meet(call, queries, turn, blocks, results, state, step, tile, j):
    """The logits of one block, beside the sums of the one before."""
    S: gl.constexpr = tile.own.index.type.layout.parent
    OUT: gl.constexpr = state.sums.type.layout
    product = _times_keys(queries, turn, blocks, step, S)
    summing = _times_values(state, blocks, step)
    logits = warpgroup_mma_wait(1, [product])
    top, shrink, total, weights = _weigh(call, results, tile, j, logits, state.top, state.total)
    # A wait in between, or the assembler would have the softmax wait for the sums, too.
    blocks.wait_for_keys(step + 1)
    sums = warpgroup_mma_wait(0, [summing])
    blocks.release(step)
    if not results.BOUNDED:
        sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
    weights = gl.convert_layout(weights.to(state.weights.dtype), gl.DotOperandLayout(0, OUT, 2))
    return Softmax(top, total, sums, weights)


@gluon.jit
def _finish(call, queries, turn, results, tile, top, total, sums):
    """The queries were read: the output takes their place on its way."""
    OUT: gl.constexpr = sums.type.layout
    total = gl.convert_layout(gl.sum(total, 1), top.type.layout)
    sums = sums * gl.convert_layout(gl.where(total > 0, 1.0 / total, 0.0), gl.SliceLayout(1, OUT))[:, None]
    store_rows(
        queries.at(turn).reshape([64, call.WIDTH]), sums.to(queries.tiles.dtype), results.out, tile.batch, tile.row,
        tile.head, 0, call.own_length, call.HEADS, results.DIM,
    )  # fmt: skip
    fence_async_shared()
    queries.release(turn)
    found = gl.where(total > 0, (top + gl.log2(total)) * LN2, -float("inf"))
    at = (tile.batch * call.HEADS + tile.head).to(gl.int64) * call.own_length + tile.own.index
    gl.store(results.lse + at, found, mask=tile.own.index < call.own_length)


@gluon.jit
def _times_keys(queries, turn, blocks, step, S: gl.constexpr):
    q = queries.at(turn).reshape([64, blocks.WIDTH])
    nothing = gl.zeros([64, blocks.ROWS], gl.float32, S)
    return warpgroup_mma(q, blocks.keys_of(step).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _times_values(state, blocks, step):
    blocks.wait_for_values(step)
    return warpgroup_mma(state.weights, blocks.values_of(step), state.sums, is_async=True)


@gluon.jit
def _masked(call, tile, j, x, nothing):
    if (j < tile.whole) | (j >= tile.whole_end):
        S: gl.constexpr = x.type.layout
        x = gl.where(seen(call, tile.own, tile.batch, j * call.OTHER_BLOCK, call.OTHER_BLOCK, S), x, nothing)
    return x


@gluon.jit
def _weigh(call, results, tile, j, logits, top, total):
    """One step of the online softmax, in units of log2: also by how much what was there shrinks, and the weights."""
    UNIT: gl.constexpr = (call.CAP if call.CAP > 0 else call.SCALE) * LOG2E
    new_top, shrink = top, top
    if results.BOUNDED:
        weights = _masked(call, tile, j, bent_weights(call, logits), 0.0)
    else:
        logits = _masked(call, tile, j, bent(call, logits), -float("inf"))
        new_top = gl.maximum(top, gl.max(logits, 1) * UNIT)
        shrink = gl.exp2(top - new_top)
        total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None]
        weights = gl.exp2(logits * UNIT - new_top[:, None])
    return new_top, shrink, total + _in_parts(weights), weights


@gluon.jit
def _in_parts(weights):
    """Every eighth number of each row: no part takes what another thread has. The parts are summed up once a tile."""
    return gl.sum(weights.reshape([64, weights.shape[1] // 8, 8]), 1)
