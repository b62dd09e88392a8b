"""The forward pass: one warp fetches tiles into shared memory, and two groups of four warps compute.

Each group takes half of the queries of a tile. In a group the product with the values of one block runs at the same
time as the softmax of the next block, across tiles too. While one group computes a softmax, the other multiplies.
Programs are persistent: each takes one tile of queries after another.

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

from ejkernel_triton.flash_attention_sm90._shared import (
    Call,
    OwnTokens,
    allocate_ring,
    apply_soft_cap,
    clear_empty_slots,
    is_visible,
    own_tokens,
    soft_cap_weights,
    store_rows,
)
from ejkernel_triton.gluon import tma
from ejkernel_triton.gluon.constants import LOG2E
from ejkernel_triton.gluon.shared_memory import barriers

#: Queries of a tile: 64 for each of two groups of warps.
Q_BLOCK = gl.constexpr(128)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-3.4028234663852886e38)
#: The largest magnitude of logits, in units of log2, for which weights are computed without a maximum. It leaves a
#: factor of 2 ** 48 for the values and their number, in sums in float32.
MOST_EXPONENT = gl.constexpr(80)


@aggregate
class Blocks:
    """A ring of blocks of keys and values. A step multiplies by the keys of one block and by the values of the block
    before it. So the first step of a program has no values, and its last step has no keys.
    """

    keys: gl.shared_memory_descriptor
    values: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor
    values_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    COUNT: gl.constexpr
    ROWS: gl.constexpr
    WIDTH: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, keys, values, keys_full, values_full, empty, COUNT, ROWS, WIDTH):
        self.keys = keys
        self.values = values
        self.keys_full = keys_full
        self.values_full = values_full
        self.empty = empty
        self.COUNT = gl.constexpr(COUNT)
        self.ROWS = gl.constexpr(ROWS)
        self.WIDTH = gl.constexpr(WIDTH)

    @gluon.jit
    def fill(self, step, key, value, k_batch, k_head, k_row, v_batch, v_head, v_row):
        """Fetch the blocks of a step as soon as its slot is empty. A row below 0 means no block."""
        slot = step % self.COUNT
        mbarrier.wait(self.empty.index(slot), ((step // self.COUNT) & 1) ^ 1)
        _fill(self.keys_full.index(slot), key, k_batch, k_head, k_row, self.keys.index(slot))
        _fill(self.values_full.index(slot), value, v_batch, v_head, v_row, self.values.index(slot))

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
        """Give the slot of a step back, whose blocks have been read."""
        mbarrier.arrive(self.empty.index(step % self.COUNT))


@gluon.jit
def _fill(full, desc, batch, head, row, tile):
    if row >= 0:
        mbarrier.expect(full, desc.block_type.nbytes)
        tma.load(desc, [batch, row, head, 0], full, tile)
    else:
        mbarrier.arrive(full)


@gluon.jit
def allocate_blocks(desc, COUNT: gl.constexpr):
    keys = gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_shape, desc.layout)
    values = gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_shape, desc.layout)
    full = barriers(COUNT, 1), barriers(COUNT, 1)
    return Blocks(keys, values, full[0], full[1], barriers(COUNT, 2), COUNT, desc.block_shape[1], desc.block_shape[3])


@aggregate
class Results:
    """The arrays of results, and the sinks."""

    out: gl.tensor
    #: The log-sum-exp of the rows is stored if LSE is True.
    lse: gl.tensor
    sinks: gl.tensor
    LSE: gl.constexpr
    DIM: gl.constexpr
    SINKS: gl.constexpr
    SINK_WIDTH: gl.constexpr
    #: Whether a soft cap bounds all logits, so that weights need no maximum.
    IS_BOUNDED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, out, lse, sinks, LSE, DIM, SINKS, SINK_WIDTH, IS_BOUNDED):
        self.out = out
        self.lse = lse
        self.sinks = sinks
        self.LSE = gl.constexpr(LSE)
        self.DIM = gl.constexpr(DIM)
        self.SINKS = gl.constexpr(SINKS)
        self.SINK_WIDTH = gl.constexpr(SINK_WIDTH)
        self.IS_BOUNDED = gl.constexpr(IS_BOUNDED)


@aggregate
class Softmax:
    """The state of the online softmax: the maximum of the logits, eight partial sums of the weights, the sum of the
    weighted values, and the weights of the last block, which have not met their values yet.
    """

    row_max: gl.tensor
    row_sum: gl.tensor
    sums: gl.tensor
    weights: gl.tensor

    @gluon.constexpr_function
    def __init__(self, row_max, row_sum, sums, weights):
        self.row_max = row_max
        self.row_sum = row_sum
        self.sums = sums
        self.weights = weights


@gluon.jit
def attend(
    query, key, value, schedule, ranges, starts, stops, q_ids, k_ids, sinks,
    q_length, k_length, schedule_width, ranges_stride,
    out, lse,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr, SCALE: gl.constexpr,
    CAP: gl.constexpr, LSE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PACKED: gl.constexpr,
    SEGMENTS: gl.constexpr, START: gl.constexpr, LENGTHS: gl.constexpr, SLOTS: gl.constexpr, SINKS: gl.constexpr,
    SINK_WIDTH: gl.constexpr, K_BLOCK: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """(batch, length, heads, dim) in and out; the log-sum-exp is (batch, heads, length)."""
    call = Call(
        # Triton makes a constant of what is 1.
        gl.to_tensor(q_length), gl.to_tensor(k_length), schedule, gl.to_tensor(schedule_width),
        ranges, gl.to_tensor(ranges_stride), starts, stops, q_ids, k_ids, HEADS, SCALE, CAP, LEFT, RIGHT, PACKED,
        SEGMENTS, START, LENGTHS, SLOTS, True, True, WIDTH, Q_BLOCK, K_BLOCK,
    )  # fmt: skip
    # Sinks have no bound.
    HAS_SMALL_CAP: gl.constexpr = CAP > 0 and CAP * LOG2E <= MOST_EXPONENT
    IS_BOUNDED: gl.constexpr = HAS_SMALL_CAP and SINKS == 0 and out.dtype.element_ty == gl.bfloat16
    results = Results(out, lse, sinks, LSE, DIM, SINKS, SINK_WIDTH, IS_BOUNDED)
    queries_0 = allocate_ring(query, TILES, 1)
    queries_1 = allocate_ring(query, TILES, 1)
    blocks = allocate_blocks(key, STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_warp_group_0, (call, queries_0, blocks, results)),
            (_warp_group_1, (call, queries_1, blocks, results)),
            (_fetch, (call, queries_0, queries_1, blocks, query, key, value, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _fetch(call, queries_0, queries_1, blocks, query, key, value, GROUP: gl.constexpr):
    """The work of the warp that fetches: all tiles, in the order in which the other warps read them."""
    step = 0
    v_batch, v_head, v_row = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(-1)
    for t in range(call.tile_count()):
        batch, head, block = call.tile(t)
        first, _, _, end = call.block_range(batch, block)
        kv_head = head // GROUP
        for i in range(end - first):
            k_row = (end - 1 - i) * call.OTHER_BLOCK
            blocks.fill(step, key, value, batch, kv_head, k_row, v_batch, v_head, v_row)
            if i == 0:
                row = block * call.OWN_BLOCK
                queries_0.fill(t, query, [batch, row, head, 0])
                queries_1.fill(t, query, [batch, row + 64, head, 0])
            v_batch, v_head, v_row = batch, kv_head, k_row
            step += 1
    blocks.fill(step, key, value, v_batch, v_head, -1, v_batch, v_head, v_row)


@gluon.jit
def _warp_group_0(call, queries, blocks, results):
    _attend(0, call, queries, blocks, results)


@gluon.jit
def _warp_group_1(call, queries, blocks, results):
    _attend(1, call, queries, blocks, results)


@aggregate
class Tile:
    """The queries of one group of warps, and the range of blocks of keys that they see, from the last to the first."""

    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor
    first: gl.tensor
    full: gl.tensor
    full_end: gl.tensor
    end: gl.tensor
    own: OwnTokens

    @gluon.constexpr_function
    def __init__(self, batch, head, row, first, full, full_end, end, own):
        self.batch = batch
        self.head = head
        self.row = row
        self.first = first
        self.full = full
        self.full_end = full_end
        self.end = end
        self.own = own


@gluon.jit
def _tile(call, t, WARP_GROUP: gl.constexpr, ROWS: gl.constexpr):
    batch, head, block = call.tile(t)
    first, full, full_end, end = call.block_range(batch, block)
    row = block * call.OWN_BLOCK + WARP_GROUP * 64
    own = own_tokens(call, batch, row, 64, ROWS)
    return Tile(batch, head, row, first, full, full_end, end, own)


@gluon.jit
def _attend(WARP_GROUP: gl.constexpr, call, queries, blocks, results):
    """The work of a group of four warps: 64 of the queries of each tile."""
    WIDTH: gl.constexpr = call.WIDTH
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.OTHER_BLOCK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    count = call.tile_count()
    tile = _tile(call, 0, WARP_GROUP, ROWS)
    queries.wait(0)
    blocks.wait_for_keys(0)
    product = _start_logits(queries, 0, blocks, 0, S)
    row_max, row_sum, weights = _first_softmax(call, results, tile, warpgroup_mma_wait(0, [product]))
    state = _initial_state(row_max, row_sum, weights, WIDTH, OUT, queries.tiles.dtype)
    blocks.release(0)
    blocks.wait_for_keys(1)
    first_step = 1
    for t in range(count):
        # The step of the tile's last sums. It is used after the inner loop, too: Triton 3.6 treats a value that the
        # outer loop carries as dead, and keeps its first value, if only the bounds of an inner loop use it.
        last_step = first_step + (tile.end - 1 - tile.first)
        j = tile.end - 2
        for step in range(first_step, last_step):
            state = _step(call, queries, t, blocks, results, state, step, tile, j)
            j -= 1
        _clear_values(call, blocks, last_step, tile, tile.first)
        # The first logits of the next tile, at the same time as the last sums of this one.
        next_tile = _tile(call, gl.minimum(t + 1, count - 1), WARP_GROUP, ROWS)
        row_max, row_sum = state.row_max, state.row_sum
        next_max, next_sum, weights = row_max, row_sum, gl.zeros([64, call.OTHER_BLOCK], gl.float32, S)
        if queries.COUNT > 1:
            if t + 1 < count:
                queries.wait(t + 1)
                product = _start_logits(queries, t + 1, blocks, last_step, S)
                sums_product = _start_sums(state, blocks, last_step)
                logits = warpgroup_mma_wait(1, [product])
                next_max, next_sum, weights = _first_softmax(call, results, next_tile, logits)
                blocks.wait_for_keys(last_step + 1)
                sums = warpgroup_mma_wait(0, [sums_product])
            else:
                sums = warpgroup_mma_wait(0, [_start_sums(state, blocks, last_step)])
            _finish(call, queries, t, results, tile, row_max, row_sum, sums)
        else:
            sums = warpgroup_mma_wait(0, [_start_sums(state, blocks, last_step)])
            _finish(call, queries, t, results, tile, row_max, row_sum, sums)
            if t + 1 < count:
                queries.wait(t + 1)
                product = _start_logits(queries, t + 1, blocks, last_step, S)
                logits = warpgroup_mma_wait(0, [product])
                next_max, next_sum, weights = _first_softmax(call, results, next_tile, logits)
                blocks.wait_for_keys(last_step + 1)
        state = _initial_state(next_max, next_sum, weights, WIDTH, OUT, queries.tiles.dtype)
        blocks.release(last_step)
        first_step = last_step + 1
        tile = next_tile


@gluon.jit
def _first_softmax(call, results, tile, logits):
    """The softmax of the sinks and of a tile's first block."""
    S: gl.constexpr = logits.type.layout
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    row_max = gl.full([64], 0.0 if results.IS_BOUNDED else LOWEST, gl.float32, ROWS)
    row_sum = _partial_sums(gl.zeros([64, call.OTHER_BLOCK], gl.float32, S))
    if results.SINKS > 0:
        index = gl.arange(0, results.SINK_WIDTH, gl.BlockedLayout([1], [32], [4], [0]))
        sink = gl.load(
            results.sinks + tile.head * results.SINKS + index, mask=index < results.SINKS, other=-float("inf")
        )
        sink = sink.to(gl.float32)
        largest = gl.maximum(gl.max(sink, 0), LOWEST / 2)
        row_max = gl.zeros([64], gl.float32, ROWS) + largest * LOG2E
        # Subtract before scaling: the difference of two rounded products would have a large relative error.
        row_sum += gl.sum(gl.exp2((sink - largest) * LOG2E), 0) / row_sum.shape[1]
    row_max, _, row_sum, weights = _softmax_step(call, results, tile, tile.end - 1, logits, row_max, row_sum)
    return row_max, row_sum, weights


@gluon.jit
def _initial_state(row_max, row_sum, weights, WIDTH: gl.constexpr, OUT: gl.constexpr, dtype: gl.constexpr):
    sums = gl.zeros([64, WIDTH], gl.float32, OUT)
    return Softmax(row_max, row_sum, sums, gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, OUT, 2)))


@gluon.jit
def _step(call, queries, t, blocks, results, state, step, tile, j):
    """The logits of one block, at the same time as the sums of the block before it."""
    S: gl.constexpr = tile.own.index.type.layout.parent
    OUT: gl.constexpr = state.sums.type.layout
    _clear_values(call, blocks, step, tile, j + 1)
    product = _start_logits(queries, t, blocks, step, S)
    sums_product = _start_sums(state, blocks, step)
    logits = warpgroup_mma_wait(1, [product])
    row_max, rescale, row_sum, weights = _softmax_step(call, results, tile, j, logits, state.row_max, state.row_sum)
    # Without a wait between them, the assembler would let the softmax wait for the sums, too.
    blocks.wait_for_keys(step + 1)
    sums = warpgroup_mma_wait(0, [sums_product])
    blocks.release(step)
    if not results.IS_BOUNDED:
        sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, OUT))[:, None]
    weights = gl.convert_layout(weights.to(state.weights.dtype), gl.DotOperandLayout(0, OUT, 2))
    return Softmax(row_max, row_sum, sums, weights)


@gluon.jit
def _finish(call, queries, t, results, tile, row_max, row_sum, sums):
    """Store the results of a tile. The output passes through the shared memory of the queries, which have been read."""
    OUT: gl.constexpr = sums.type.layout
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), row_max.type.layout)
    sums = sums * gl.convert_layout(gl.where(row_sum > 0, 1.0 / row_sum, 0.0), gl.SliceLayout(1, OUT))[:, None]
    store_rows(
        queries.tile(t).reshape([64, call.WIDTH]), sums.to(queries.tiles.dtype), results.out, tile.batch, tile.row,
        tile.head, 0, call.own_length, call.HEADS, results.DIM,
    )  # fmt: skip
    fence_async_shared()
    queries.release(t)
    if results.LSE:
        lse = gl.where(row_sum > 0, (row_max + gl.log2(row_sum)) * LN2, -float("inf"))
        offsets = (tile.batch * call.HEADS + tile.head).to(gl.int64) * call.own_length + tile.own.index
        gl.store(results.lse + offsets, lse, mask=tile.own.index < call.own_length)


@gluon.jit
def _start_logits(queries, t, blocks, step, S: gl.constexpr):
    q = queries.tile(t).reshape([64, blocks.WIDTH])
    zeros = gl.zeros([64, blocks.ROWS], gl.float32, S)
    return warpgroup_mma(q, blocks.keys_of(step).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_sums(state, blocks, step):
    blocks.wait_for_values(step)
    return warpgroup_mma(state.weights, blocks.values_of(step), state.sums, is_async=True)


@gluon.jit
def _clear_values(call, blocks, step, tile, j):
    """Clear the values of empty slots in block ``j``, with which a step begins. Only a range's last block may reach
    beyond the number of keys.
    """
    if call.LENGTHS or call.SLOTS:
        has_empty = (j < tile.full) | (j >= tile.full_end)
        if call.LENGTHS:
            has_empty = has_empty & (j == tile.end - 1)
        if has_empty:
            blocks.wait_for_values(step)
            values = blocks.values_of(step)
            clear_empty_slots(call, tile.batch, j * call.OTHER_BLOCK, call.other_length, values)


@gluon.jit
def _mask(call, tile, j, x, fill):
    if (j < tile.full) | (j >= tile.full_end):
        S: gl.constexpr = x.type.layout
        x = gl.where(is_visible(call, tile.own, tile.batch, j * call.OTHER_BLOCK, call.OTHER_BLOCK, S), x, fill)
    return x


@gluon.jit
def _softmax_step(call, results, tile, j, logits, row_max, row_sum):
    """One step of the online softmax, in units of log2: the new maximum, the factor for earlier sums, the new sum and
    the weights.
    """
    UNIT: gl.constexpr = (call.CAP if call.CAP > 0 else call.SCALE) * LOG2E
    new_max, rescale = row_max, row_max
    if results.IS_BOUNDED:
        weights = _mask(call, tile, j, soft_cap_weights(call, logits), 0.0)
    else:
        logits = _mask(call, tile, j, apply_soft_cap(call, logits), -float("inf"))
        new_max = gl.maximum(row_max, gl.max(logits, 1) * UNIT)
        rescale = gl.exp2(row_max - new_max)
        row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None]
        weights = gl.exp2(logits * UNIT - new_max[:, None])
    return new_max, rescale, row_sum + _partial_sums(weights), weights


@gluon.jit
def _partial_sums(weights):
    """Eight sums for each row, each over the weights of one thread. They are added up once a tile."""
    return gl.sum(weights.reshape([64, weights.shape[1] // 8, 8]), 1)
