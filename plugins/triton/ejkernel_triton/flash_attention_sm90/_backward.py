"""The backward pass: five products for each pair of blocks, and every weight is computed once.

A program keeps 128 keys and their values, and loops over the queries that see them, of all heads that share them. One
warp fetches ahead. Two groups of four warps have 64 keys each; their tiles are (keys, queries). The gradients of keys
and values are summed in registers. The gradient of queries needs the tiles of both groups, and of several programs:
each program adds its part to memory by the copy engine, in no fixed order, so that the last bits differ from run to
run. For the same bits every time there is the portable kernel. The parts are stored in the layout of the threads,
because rows of 64 floats would have bank conflicts in shared memory.
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
    allocate_ring,
    apply_soft_cap,
    clear_empty_slots,
    is_visible,
    own_tokens,
    store_rows,
)
from ejkernel_triton.gluon import tma
from ejkernel_triton.gluon.constants import LOG2E
from ejkernel_triton.gluon.shared_memory import barriers


@aggregate
class Queries:
    """A ring of blocks of queries, with their lse, and of gradients of the output, with their delta."""

    query: gl.shared_memory_descriptor
    d_out: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    query_full: gl.shared_memory_descriptor
    d_out_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    COUNT: gl.constexpr
    ROWS: gl.constexpr
    WIDTH: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, query, d_out, lse, delta, query_full, d_out_full, empty, COUNT, ROWS, WIDTH):
        self.query = query
        self.d_out = d_out
        self.lse = lse
        self.delta = delta
        self.query_full = query_full
        self.d_out_full = d_out_full
        self.empty = empty
        self.COUNT = gl.constexpr(COUNT)
        self.ROWS = gl.constexpr(ROWS)
        self.WIDTH = gl.constexpr(WIDTH)

    @gluon.jit
    def fill(self, n, sources, batch, head, row):
        """Fetch the n-th block as soon as its slot is empty."""
        slot = n % self.COUNT
        mbarrier.wait(self.empty.index(slot), ((n // self.COUNT) & 1) ^ 1)
        head_row = batch * sources.HEADS + head
        full = self.query_full.index(slot)
        mbarrier.expect(full, sources.query.block_type.nbytes + sources.lse.block_type.nbytes)
        tma.load(sources.query, [batch, row, head, 0], full, self.query.index(slot))
        tma.load(sources.lse, [head_row, row], full, self.lse.index(slot))
        full = self.d_out_full.index(slot)
        mbarrier.expect(full, sources.d_out.block_type.nbytes + sources.delta.block_type.nbytes)
        tma.load(sources.d_out, [batch, row, head, 0], full, self.d_out.index(slot))
        tma.load(sources.delta, [head_row, row], full, self.delta.index(slot))

    @gluon.jit
    def wait_for_query(self, n, is_needed=True):
        mbarrier.wait(self.query_full.index(n % self.COUNT), (n // self.COUNT) & 1, pred=is_needed)

    @gluon.jit
    def wait_for_d_out(self, n):
        mbarrier.wait(self.d_out_full.index(n % self.COUNT), (n // self.COUNT) & 1)

    @gluon.jit
    def query_of(self, n):
        return self.query.index(n % self.COUNT).reshape([self.ROWS, self.WIDTH])

    @gluon.jit
    def d_out_of(self, n):
        return self.d_out.index(n % self.COUNT).reshape([self.ROWS, self.WIDTH])

    @gluon.jit
    def release(self, n):
        """Give the slot of the n-th block back, which has been read."""
        mbarrier.arrive(self.empty.index(n % self.COUNT))


@gluon.jit
def allocate_queries(query, lse, COUNT: gl.constexpr):
    """An empty ring of ``COUNT`` blocks."""
    return Queries(
        gl.allocate_shared_memory(query.dtype, [COUNT] + query.block_shape, query.layout),
        gl.allocate_shared_memory(query.dtype, [COUNT] + query.block_shape, query.layout),
        gl.allocate_shared_memory(gl.float32, [COUNT] + lse.block_shape, lse.layout),
        gl.allocate_shared_memory(gl.float32, [COUNT] + lse.block_shape, lse.layout),
        barriers(COUNT, 1),
        barriers(COUNT, 1),
        barriers(COUNT, 2),
        COUNT,
        query.block_shape[1],
        query.block_shape[3],
    )


@aggregate
class Sources:
    """The arrays that `Queries` are fetched from."""

    query: tma.Descriptor
    d_out: tma.Descriptor
    lse: tma.Descriptor
    delta: tma.Descriptor
    HEADS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, query, d_out, lse, delta, HEADS):
        self.query = query
        self.d_out = d_out
        self.lse = lse
        self.delta = delta
        self.HEADS = gl.constexpr(HEADS)


@aggregate
class Results:
    """The arrays of gradients. That of queries is added to, in the layout of `to_rows_of_threads`."""

    d_key: gl.tensor
    d_value: gl.tensor
    d_query: tma.Descriptor
    DIM: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, d_key, d_value, d_query, DIM):
        self.d_key = d_key
        self.d_value = d_value
        self.d_query = d_query
        self.DIM = gl.constexpr(DIM)


@aggregate
class Shared:
    """What the two groups of warps share: the keys of both, the gradients of the logits of both, alternating between
    two slots, and the barriers for both.
    """

    keys_0: gl.shared_memory_descriptor
    keys_1: gl.shared_memory_descriptor
    keys_full_0: gl.shared_memory_descriptor
    keys_full_1: gl.shared_memory_descriptor
    d_logits_0: gl.shared_memory_descriptor
    d_logits_1: gl.shared_memory_descriptor
    d_logits_full: gl.shared_memory_descriptor
    keys_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, keys_0, keys_1, keys_full_0, keys_full_1, d_logits_0, d_logits_1, d_logits_full, keys_empty):
        self.keys_0 = keys_0
        self.keys_1 = keys_1
        self.keys_full_0 = keys_full_0
        self.keys_full_1 = keys_full_1
        self.d_logits_0 = d_logits_0
        self.d_logits_1 = d_logits_1
        self.d_logits_full = d_logits_full
        self.keys_empty = keys_empty


@gluon.jit
def sum_over_queries(
    query, key, value, d_out, lse, delta, d_query, schedule, ranges, starts, stops, k_ids, q_ids,
    q_length, k_length, schedule_width, ranges_stride,
    d_key, d_value,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr, SCALE: gl.constexpr,
    CAP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PACKED: gl.constexpr, SEGMENTS: gl.constexpr,
    START: gl.constexpr, LENGTHS: gl.constexpr, SLOTS: gl.constexpr,
    Q_BLOCK: gl.constexpr, STAGES: gl.constexpr, D_QUERY: gl.constexpr, EARLY_LOGITS: gl.constexpr,
):  # fmt: skip
    """``d_query`` is (batch * heads * blocks * Q_BLOCK * WIDTH / 32, 32) in float32: for each batch, head, block and
    tile of 64 queries or dims, the tile in the layout of `to_rows_of_threads`. Its initial values are 0, and it is not
    scaled; without ``D_QUERY`` it does not change. ``lse`` and ``delta`` are (batch * heads, padded length), and the
    lse of padding is inf. ``LEFT`` and ``RIGHT`` limit the queries that a key sees. With ``EARLY_LOGITS`` a step starts
    the first product of the next step before it writes the gradient of queries.
    """
    KV_HEADS: gl.constexpr = HEADS // GROUP
    # Gradients of logits have two slots. A group that does not read one of them may write to it again once the queries
    # of that slot have been released.
    gl.static_assert(STAGES == 2)
    call = Call(
        # Triton makes a constant of what is 1.
        gl.to_tensor(k_length), gl.to_tensor(q_length), schedule, gl.to_tensor(schedule_width),
        ranges, gl.to_tensor(ranges_stride), starts, stops, k_ids, q_ids, KV_HEADS, SCALE, CAP, LEFT, RIGHT, PACKED,
        SEGMENTS, START, LENGTHS, SLOTS, False, CAP > 0 or START, WIDTH, 128, Q_BLOCK,
    )  # fmt: skip
    dtype: gl.constexpr = query.dtype
    sources = Sources(query, d_out, lse, delta, HEADS)
    results = Results(d_key, d_value, d_query, DIM)
    keys_0 = allocate_ring(key, 1, 1)
    keys_1 = allocate_ring(key, 1, 1)
    values_0 = allocate_ring(value, 1, 1)
    values_1 = allocate_ring(value, 1, 1)
    queries = allocate_queries(query, lse, STAGES)
    d_logits: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, Q_BLOCK], dtype)
    shared = Shared(
        keys_0.tile(0),
        keys_1.tile(0),
        keys_0.full,
        keys_1.full,
        gl.allocate_shared_memory(dtype, [2, 64, Q_BLOCK], d_logits),
        gl.allocate_shared_memory(dtype, [2, 64, Q_BLOCK], d_logits),
        barriers(2, 2),
        barriers(1, 2),
    )
    part_0 = gl.allocate_shared_memory(gl.float32, d_query.block_shape, d_query.layout)
    part_1 = gl.allocate_shared_memory(gl.float32, d_query.block_shape, d_query.layout)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_warp_group_0, (call, keys_0, values_0, queries, shared, part_0, results, GROUP, D_QUERY, EARLY_LOGITS)),
            (_warp_group_1, (call, keys_1, values_1, queries, shared, part_1, results, GROUP, D_QUERY, EARLY_LOGITS)),
            (_fetch, (call, keys_0, keys_1, values_0, values_1, queries, key, value, sources, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _fetch(call, keys_0, keys_1, values_0, values_1, queries, key, value, sources, GROUP: gl.constexpr):
    """The work of the warp that fetches: all tiles, in the order in which the other warps read them."""
    n = 0
    for t in range(call.tile_count()):
        batch, kv_head, block = call.tile(t)
        row = block * call.OWN_BLOCK
        keys_0.fill(t, key, [batch, row, kv_head, 0])
        keys_1.fill(t, key, [batch, row + 64, kv_head, 0])
        values_0.fill(t, value, [batch, row, kv_head, 0])
        values_1.fill(t, value, [batch, row + 64, kv_head, 0])
        n = fetch_queries(call, n, batch, kv_head, block, queries, sources, GROUP)


@gluon.jit
def fetch_queries(call, n, batch, kv_head, block, queries, sources, GROUP: gl.constexpr):
    """Fetch the blocks of queries that see a block of keys, of all heads, as the n-th and following blocks of the ring.
    Returns the number of the next one.
    """
    first, _, _, end = call.block_range(batch, block)
    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        i = first_block(call, block, first, end)
        for _ in range(first, end):
            queries.fill(n, sources, batch, head, i * call.OTHER_BLOCK)
            i = gl.where(i + 1 < end, i + 1, first)
            n += 1
    return n


@gluon.jit
def first_block(call, block, first, end):
    """The block of queries that a tile starts with. Neighbouring tiles start with different ones, even without a mask,
    because they add to the same memory.
    """
    start = block * (call.OWN_BLOCK // call.OTHER_BLOCK)
    return first + gl.maximum(start - first, 0) % gl.maximum(end - first, 1)


@gluon.jit
def weights_and_logits(call, own, batch, first, is_partial, logits, row_lse):
    """The weights of a tile of own tokens and other tokens from ``first``, and the logits, with masks if the block
    ``is_partial``.
    """
    UNIT: gl.constexpr = (call.CAP if call.CAP > 0 else call.SCALE) * LOG2E
    COUNT: gl.constexpr = logits.shape[1]
    S: gl.constexpr = logits.type.layout
    if call.CAP > 0:
        # The derivative of the cap needs the capped logits later, and registers do not hold all logits and all weights.
        # So a mask replaces logits, by a number whose weight is 0, also after the product with that derivative.
        if is_partial:
            logits = gl.where(is_visible(call, own, batch, first, COUNT, S), logits, -(2.0**60))
        weights = gl.exp2(logits * UNIT - row_lse)
    else:
        weights = gl.exp2(logits * UNIT - row_lse)
        if is_partial:
            weights = gl.where(is_visible(call, own, batch, first, COUNT, S), weights, 0.0)
    return weights, logits


@gluon.jit
def _warp_group_0(
    call, keys, values, queries, shared, d_query_tile, results,
    GROUP: gl.constexpr, D_QUERY: gl.constexpr, EARLY_LOGITS: gl.constexpr,
):  # fmt: skip
    _sum(0, call, keys, values, queries, shared, shared.d_logits_0, d_query_tile, results, GROUP, D_QUERY, EARLY_LOGITS)


@gluon.jit
def _warp_group_1(
    call, keys, values, queries, shared, d_query_tile, results,
    GROUP: gl.constexpr, D_QUERY: gl.constexpr, EARLY_LOGITS: gl.constexpr,
):  # fmt: skip
    _sum(1, call, keys, values, queries, shared, shared.d_logits_1, d_query_tile, results, GROUP, D_QUERY, EARLY_LOGITS)


@gluon.jit
def _sum(
    WARP_GROUP: gl.constexpr,
    call,
    keys,
    values,
    queries,
    shared,
    d_logits,
    d_query_tile,
    results,
    GROUP: gl.constexpr,
    D_QUERY: gl.constexpr,
    EARLY_LOGITS: gl.constexpr,
):
    """The work of a group of four warps: 64 of the keys of each tile, and half of the gradient of queries: half of 128
    dims, half of the 128 queries of a block, or every other block.
    """
    WIDTH: gl.constexpr = call.WIDTH
    Q_BLOCK: gl.constexpr = call.OTHER_BLOCK
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Q_BLOCK, 16])
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    PARTS: gl.constexpr = WIDTH * Q_BLOCK // 4096
    blocks = gl.cdiv(call.other_length, Q_BLOCK)
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, D, 2)
    dtype: gl.constexpr = keys.tiles.dtype
    k = keys.tile(0).reshape([64, WIDTH])
    v = values.tile(0).reshape([64, WIDTH])
    k_0 = shared.keys_0.reshape([64, WIDTH])
    k_1 = shared.keys_1.reshape([64, WIDTH])
    if WIDTH == 128:
        k_0 = k_0.slice(WARP_GROUP * 64, 64, dim=1)
        k_1 = k_1.slice(WARP_GROUP * 64, 64, dim=1)
    # With EARLY_LOGITS, queries are released before all gradients of logits have been read. That is safe if both groups
    # wait for these in each step, but not if they alternate.
    gl.static_assert(PARTS == 2 or not EARLY_LOGITS)
    zero_logits = gl.zeros([64, Q_BLOCK], gl.float32, S)
    n = 0
    for t in range(call.tile_count()):
        batch, kv_head, block = call.tile(t)
        first, full, full_end, end = call.block_range(batch, block)
        row = block * call.OWN_BLOCK + WARP_GROUP * 64
        own = own_tokens(call, batch, row, 64, gl.SliceLayout(1, S))
        dk = gl.zeros([64, WIDTH], gl.float32, D)
        dv = gl.zeros([64, WIDTH], gl.float32, D)
        mbarrier.wait(shared.keys_full_0.index(0), t & 1)
        mbarrier.wait(shared.keys_full_1.index(0), t & 1)
        values.wait(t)
        if (call.LENGTHS or call.SLOTS) and first < end:
            keys_row = block * call.OWN_BLOCK
            clear_empty_slots(call, batch, row, call.own_length, v)
            clear_empty_slots(call, batch, keys_row, call.own_length, shared.keys_0.reshape([64, WIDTH]))
            clear_empty_slots(call, batch, keys_row + 64, call.own_length, shared.keys_1.reshape([64, WIDTH]))
        n_end = n + (end - first) * GROUP
        if EARLY_LOGITS:
            product = warpgroup_mma_wait(0, [_start_logits(queries, n, n < n_end, k, zero_logits)])
        for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
            i = first_block(call, block, first, end)
            for _ in range(first, end):
                if not EARLY_LOGITS:
                    product = _start_logits(queries, n, True, k, zero_logits)
                queries.wait_for_d_out(n)
                d = queries.d_out_of(n)
                d_product = warpgroup_mma(v, d.permute((1, 0)), zero_logits, use_acc=False, is_async=True)
                row_lse = queries.lse.index(n % queries.COUNT).load(S)
                if not EARLY_LOGITS:
                    product = warpgroup_mma_wait(1, [product])
                logits = apply_soft_cap(call, product)
                is_partial = (i < full) | (i >= full_end)
                weights, logits = weights_and_logits(call, own, batch, i * Q_BLOCK, is_partial, logits, row_lse)
                weights_operand = gl.convert_layout(weights.to(dtype), WEIGHTS)
                if call.CAP > 0:
                    weights = weights * (1.0 - logits * logits)
                d_weights = warpgroup_mma_wait(0, [d_product])
                dv_sum = warpgroup_mma(weights_operand, d, dv, is_async=True)
                # Late, for its registers.
                row_delta = queries.delta.index(n % queries.COUNT).load(S)
                d_logits_tile = (weights * (d_weights - row_delta)).to(dtype)
                if D_QUERY:
                    d_logits.index(n & 1).store(d_logits_tile)
                    fence_async_shared()
                    mbarrier.arrive(shared.d_logits_full.index(n & 1))
                q = queries.query_of(n)
                dk_sum = warpgroup_mma(gl.convert_layout(d_logits_tile, WEIGHTS), q, dk, is_async=True)
                if D_QUERY and (PARTS == 2 or (n & 1) == WARP_GROUP):
                    mbarrier.wait(shared.d_logits_full.index(n & 1), (n >> 1) & 1)
                    all_d_logits_0 = shared.d_logits_0.index(n & 1)
                    all_d_logits_1 = shared.d_logits_1.index(n & 1)
                    if Q_BLOCK == 128:
                        all_d_logits_0 = all_d_logits_0.slice(WARP_GROUP * 64, 64, dim=1)
                        all_d_logits_1 = all_d_logits_1.slice(WARP_GROUP * 64, 64, dim=1)
                    zero_dq = gl.zeros([64, 64], gl.float32, DQ)
                    dq_sum = warpgroup_mma(all_d_logits_0.permute((1, 0)), k_0, zero_dq, use_acc=False, is_async=True)
                    dq_sum = warpgroup_mma(all_d_logits_1.permute((1, 0)), k_1, dq_sum, is_async=True)
                    # The tile that was added before has to be read from shared memory first.
                    tma.store_wait(0)
                    if EARLY_LOGITS:
                        dv, dk = warpgroup_mma_wait(2, [dv_sum, dk_sum])
                        queries.release(n)
                        product = _start_logits(queries, n + 1, n + 1 < n_end, k, zero_logits)
                        dq = warpgroup_mma_wait(1, [dq_sum])
                    else:
                        dv, dk, dq = warpgroup_mma_wait(0, [dv_sum, dk_sum, dq_sum])
                        queries.release(n)
                    d_query_tile.store(to_rows_of_threads(dq))
                    fence_async_shared()
                    tile = (batch * call.HEADS * GROUP + head) * blocks + i
                    if PARTS == 2:
                        tile = tile * 2 + WARP_GROUP
                    tma.add(results.d_query, [tile * 128, 0], d_query_tile)
                else:
                    dv, dk = warpgroup_mma_wait(0, [dv_sum, dk_sum])
                    queries.release(n)
                if EARLY_LOGITS:
                    product = warpgroup_mma_wait(0, [product])
                i = gl.where(i + 1 < end, i + 1, first)
                n += 1
        # The gradients pass through the shared memory of the values, which this group alone has read, and of the keys,
        # which both groups have read.
        dv = dv.to(dtype)
        store_rows(v, dv, results.d_value, batch, row, kv_head, 0, call.own_length, call.HEADS, results.DIM)
        mbarrier.arrive(shared.keys_empty.index(0))
        mbarrier.wait(shared.keys_empty.index(0), t & 1)
        dk = (dk * call.SCALE).to(dtype)
        store_rows(k, dk, results.d_key, batch, row, kv_head, 0, call.own_length, call.HEADS, results.DIM)
        fence_async_shared()
        keys.release(0)
        values.release(0)
    tma.store_wait(0)


@gluon.jit
def _start_logits(queries, n, is_needed, k, zero_logits):
    """Start the product of keys and queries. If it is not needed, do not wait for the queries: the result is unused."""
    queries.wait_for_query(n, is_needed)
    return warpgroup_mma(k, queries.query_of(n).permute((1, 0)), zero_logits, use_acc=False, is_async=True)


@gluon.jit
def to_rows_of_threads(sums):
    """A tile of (64, 64) as (128, 32): a row has the numbers of one thread."""
    return sums.reshape([4, 2, 8, 8, 4, 2]).permute((0, 2, 4, 3, 1, 5)).reshape([128, 32])
