"""The backward pass: five products for each pair of blocks, and every weight computed once.

A program keeps 128 keys with their values, and walks over the queries that see them, of all the heads that share
them; one warp fetches ahead. Two groups of four warps have 64 keys each; their tiles are (keys, queries). The gradients
of keys and values grow in registers. That of queries needs what both groups found, and is finished by many programs:
each adds its part to memory by the copy engine, in whatever order they come, so that its last bits differ from run to
run. Who wants the same bits has another kernel compute it. On their way the parts lie as the threads have them: as
rows of 64 floats, what two threads write would meet in one bank of shared memory.
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
from ejkernel_triton.flash_attention_sm90._shared import LOG2E, Call, barriers, bent, own_tokens, ring, seen, store_rows


@aggregate
class Queries:
    """Blocks of queries and of gradients of the output, each with one number a row."""

    query: gl.shared_memory_descriptor
    d_out: gl.shared_memory_descriptor
    top: gl.shared_memory_descriptor
    shift: gl.shared_memory_descriptor
    query_full: gl.shared_memory_descriptor
    d_out_full: gl.shared_memory_descriptor
    done: gl.shared_memory_descriptor
    COUNT: gl.constexpr
    ROWS: gl.constexpr
    WIDTH: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, query, d_out, top, shift, query_full, d_out_full, done, COUNT, ROWS, WIDTH):
        self.query = query
        self.d_out = d_out
        self.top = top
        self.shift = shift
        self.query_full = query_full
        self.d_out_full = d_out_full
        self.done = done
        self.COUNT = gl.constexpr(COUNT)
        self.ROWS = gl.constexpr(ROWS)
        self.WIDTH = gl.constexpr(WIDTH)

    @gluon.jit
    def fill(self, n, sources, batch, head, row):
        """Fetch the n-th, as soon as its place is free."""
        place = n % self.COUNT
        mbarrier.wait(self.done.index(place), ((n // self.COUNT) & 1) ^ 1)
        at = batch * sources.HEADS + head
        full = self.query_full.index(place)
        mbarrier.expect(full, sources.query.block_type.nbytes + sources.top.block_type.nbytes)
        _tma.load(sources.query, [batch, row, head, 0], full, self.query.index(place))
        _tma.load(sources.top, [at, row], full, self.top.index(place))
        full = self.d_out_full.index(place)
        mbarrier.expect(full, sources.d_out.block_type.nbytes + sources.shift.block_type.nbytes)
        _tma.load(sources.d_out, [batch, row, head, 0], full, self.d_out.index(place))
        _tma.load(sources.shift, [at, row], full, self.shift.index(place))

    @gluon.jit
    def wait_for_query(self, n, needed=True):
        mbarrier.wait(self.query_full.index(n % self.COUNT), (n // self.COUNT) & 1, pred=needed)

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
        """The n-th was read."""
        mbarrier.arrive(self.done.index(n % self.COUNT))


@gluon.jit
def queries_of(query, tops, COUNT: gl.constexpr):
    """Places for so many blocks, and nothing in them."""
    return Queries(
        gl.allocate_shared_memory(query.dtype, [COUNT] + query.block_shape, query.layout),
        gl.allocate_shared_memory(query.dtype, [COUNT] + query.block_shape, query.layout),
        gl.allocate_shared_memory(gl.float32, [COUNT] + tops.block_shape, tops.layout),
        gl.allocate_shared_memory(gl.float32, [COUNT] + tops.block_shape, tops.layout),
        barriers(COUNT, 1),
        barriers(COUNT, 1),
        barriers(COUNT, 2),
        COUNT,
        query.block_shape[1],
        query.block_shape[3],
    )


@aggregate
class Sources:
    """Where queries and what belongs to them come from."""

    query: _tma.Descriptor
    d_out: _tma.Descriptor
    top: _tma.Descriptor
    shift: _tma.Descriptor
    HEADS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, query, d_out, top, shift, HEADS):
        self.query = query
        self.d_out = d_out
        self.top = top
        self.shift = shift
        self.HEADS = gl.constexpr(HEADS)


@aggregate
class Results:
    """Where gradients go; that of queries, in the order of ``by_threads``, is added to what is there."""

    d_key: gl.tensor
    d_value: gl.tensor
    d_query: _tma.Descriptor
    DIM: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, d_key, d_value, d_query, DIM):
        self.d_key = d_key
        self.d_value = d_value
        self.d_query = d_query
        self.DIM = gl.constexpr(DIM)


@aggregate
class Shared:
    """What the two groups have in common: the keys of both, the gradients of the logits of both, by turns in one of two
    places, and when they were written and the keys read.
    """

    keys_0: gl.shared_memory_descriptor
    keys_1: gl.shared_memory_descriptor
    keys_full_0: gl.shared_memory_descriptor
    keys_full_1: gl.shared_memory_descriptor
    slopes_0: gl.shared_memory_descriptor
    slopes_1: gl.shared_memory_descriptor
    written: gl.shared_memory_descriptor
    read: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, keys_0, keys_1, keys_full_0, keys_full_1, slopes_0, slopes_1, written, read):
        self.keys_0 = keys_0
        self.keys_1 = keys_1
        self.keys_full_0 = keys_full_0
        self.keys_full_1 = keys_full_1
        self.slopes_0 = slopes_0
        self.slopes_1 = slopes_1
        self.written = written
        self.read = read


@gluon.jit
def sum_over_queries(
    query, key, value, d_out, tops, shifts, d_query, schedule, sight, starts, stops, k_ids, q_ids,
    q_length, k_length, schedule_width, sight_batch,
    d_key, d_value,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr, SCALE: gl.constexpr,
    CAP: gl.constexpr, BEFORE: gl.constexpr, AFTER: gl.constexpr, PACKED: gl.constexpr, SEGMENTS: gl.constexpr,
    Q_BLOCK: gl.constexpr, STAGES: gl.constexpr, D_QUERY: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """``d_query`` is (batch * heads * blocks * Q_BLOCK * WIDTH / 32, 32) in float32: by batch, head, block and tile of
    64 queries or dims what ``by_threads`` makes of that tile. It begins as zeros, and is not scaled yet; without
    ``D_QUERY`` it is left at what it is. ``tops`` and ``shifts`` are (batch * heads, padded), the first inf where there
    is no query. ``BEFORE`` and ``AFTER`` are what a key sees of queries. With ``AHEAD`` a step begins the next one's
    first product before it writes the gradient of queries.
    """
    KV: gl.constexpr = HEADS // GROUP
    # Slopes have two places, and a group that does not read one knows by the queries that it may write there again.
    gl.static_assert(STAGES == 2)
    call = Call(
        # Triton makes a constant of what is 1.
        gl.to_tensor(k_length), gl.to_tensor(q_length), schedule, gl.to_tensor(schedule_width),
        sight, gl.to_tensor(sight_batch), starts, stops, k_ids, q_ids, KV, SCALE, CAP, BEFORE, AFTER, PACKED, SEGMENTS,
        CAP > 0, WIDTH, 128, Q_BLOCK,
    )  # fmt: skip
    dtype: gl.constexpr = query.dtype
    sources = Sources(query, d_out, tops, shifts, HEADS)
    results = Results(d_key, d_value, d_query, DIM)
    keys_0 = ring(key, 1, 1)
    keys_1 = ring(key, 1, 1)
    values_0 = ring(value, 1, 1)
    values_1 = ring(value, 1, 1)
    queries = queries_of(query, tops, STAGES)
    slopes: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, Q_BLOCK], dtype)
    shared = Shared(
        keys_0.at(0),
        keys_1.at(0),
        keys_0.full,
        keys_1.full,
        gl.allocate_shared_memory(dtype, [2, 64, Q_BLOCK], slopes),
        gl.allocate_shared_memory(dtype, [2, 64, Q_BLOCK], slopes),
        barriers(2, 2),
        barriers(1, 2),
    )
    part_0 = gl.allocate_shared_memory(gl.float32, d_query.block_shape, d_query.layout)
    part_1 = gl.allocate_shared_memory(gl.float32, d_query.block_shape, d_query.layout)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_half_0, (call, keys_0, values_0, queries, shared, part_0, results, GROUP, D_QUERY, AHEAD)),
            (_half_1, (call, keys_1, values_1, queries, shared, part_1, results, GROUP, D_QUERY, AHEAD)),
            (_fetch, (call, keys_0, keys_1, values_0, values_1, queries, key, value, sources, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _fetch(call, keys_0, keys_1, values_0, values_1, queries, key, value, sources, GROUP: gl.constexpr):
    """One warp: everything that the others need, in the order in which they need it."""
    n = 0
    for turn in range(call.turns()):
        batch, kv_head, block = call.tile(turn)
        row = block * call.OWN_BLOCK
        keys_0.fill(turn, key, [batch, row, kv_head, 0])
        keys_1.fill(turn, key, [batch, row + 64, kv_head, 0])
        values_0.fill(turn, value, [batch, row, kv_head, 0])
        values_1.fill(turn, value, [batch, row + 64, kv_head, 0])
        n = fetch_queries(call, n, batch, kv_head, block, queries, sources, GROUP)


@gluon.jit
def fetch_queries(call, n, batch, kv_head, block, queries, sources, GROUP: gl.constexpr):
    """Those of all heads that see a block of keys, from the n-th of all on; the number of the next."""
    first, _, _, end = call.blocks_seen(batch, block)
    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        i = begin(call, block, first, end)
        for _ in range(first, end):
            queries.fill(n, sources, batch, head, i * call.OTHER_BLOCK)
            i = gl.where(i + 1 < end, i + 1, first)
            n += 1
    return n


@gluon.jit
def begin(call, block, first, end):
    """Neighbouring tiles begin apart even where no mask has them do so: they add to the same memory."""
    apart = block * (call.OWN_BLOCK // call.OTHER_BLOCK)
    return first + gl.maximum(apart - first, 0) % gl.maximum(end - first, 1)


@gluon.jit
def weigh(call, own, batch, first, edge, logits, top):
    """The weights of some of the others, from the first on, and their logits, masked if they are at the edge of what
    the tile sees.
    """
    UNIT: gl.constexpr = (call.CAP if call.CAP > 0 else call.SCALE) * LOG2E
    COUNT: gl.constexpr = logits.shape[1]
    S: gl.constexpr = logits.type.layout
    if call.CAP > 0:
        # How far the cap bends them is needed later, and registers do not hold all logits beside all weights: so those
        # are masked, by a number whose weight is 0, and so is that times how far it is bent.
        if edge:
            logits = gl.where(seen(call, own, batch, first, COUNT, S), logits, -(2.0**60))
        weights = gl.exp2(logits * UNIT - top)
    else:
        weights = gl.exp2(logits * UNIT - top)
        if edge:
            weights = gl.where(seen(call, own, batch, first, COUNT, S), weights, 0.0)
    return weights, logits


@gluon.jit
def _half_0(
    call, keys, values, queries, shared, part, results,
    GROUP: gl.constexpr, D_QUERY: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    _sum(0, call, keys, values, queries, shared, shared.slopes_0, part, results, GROUP, D_QUERY, AHEAD)


@gluon.jit
def _half_1(
    call, keys, values, queries, shared, part, results,
    GROUP: gl.constexpr, D_QUERY: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    _sum(1, call, keys, values, queries, shared, shared.slopes_1, part, results, GROUP, D_QUERY, AHEAD)


@gluon.jit
def _sum(
    ME: gl.constexpr,
    call,
    keys,
    values,
    queries,
    shared,
    slopes,
    part,
    results,
    GROUP: gl.constexpr,
    D_QUERY: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """Four warps: 64 of the keys of each tile; and one half of the gradient of queries: of 128 dims, or of the 128
    queries of a block, or every other block.
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
    k = keys.at(0).reshape([64, WIDTH])
    v = values.at(0).reshape([64, WIDTH])
    k_0 = shared.keys_0.reshape([64, WIDTH])
    k_1 = shared.keys_1.reshape([64, WIDTH])
    if WIDTH == 128:
        k_0 = k_0.slice(ME * 64, 64, dim=1)
        k_1 = k_1.slice(ME * 64, 64, dim=1)
    # Ahead, queries are let go of before all slopes are read. That these are, the other half knows because both wait
    # for what was written in each step; where they take turns at it, nothing would tell.
    gl.static_assert(PARTS == 2 or not AHEAD)
    nothing = gl.zeros([64, Q_BLOCK], gl.float32, S)
    n = 0
    for turn in range(call.turns()):
        batch, kv_head, block = call.tile(turn)
        first, whole, whole_end, end = call.blocks_seen(batch, block)
        row = block * call.OWN_BLOCK + ME * 64
        own = own_tokens(call, batch, row, 64, gl.SliceLayout(1, S))
        dk = gl.zeros([64, WIDTH], gl.float32, D)
        dv = gl.zeros([64, WIDTH], gl.float32, D)
        mbarrier.wait(shared.keys_full_0.index(0), turn & 1)
        mbarrier.wait(shared.keys_full_1.index(0), turn & 1)
        values.wait(turn)
        n_end = n + (end - first) * GROUP
        if AHEAD:
            product = warpgroup_mma_wait(0, [_begin_logits(queries, n, n < n_end, k, nothing)])
        for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
            i = begin(call, block, first, end)
            for _ in range(first, end):
                if not AHEAD:
                    product = _begin_logits(queries, n, True, k, nothing)
                queries.wait_for_d_out(n)
                d = queries.d_out_of(n)
                d_product = warpgroup_mma(v, d.permute((1, 0)), nothing, use_acc=False, is_async=True)
                top = queries.top.index(n % queries.COUNT).load(S)
                if not AHEAD:
                    product = warpgroup_mma_wait(1, [product])
                logits = bent(call, product)
                edge = (i < whole) | (i >= whole_end)
                weights, logits = weigh(call, own, batch, i * Q_BLOCK, edge, logits, top)
                factors = gl.convert_layout(weights.to(dtype), WEIGHTS)
                if call.CAP > 0:
                    weights = weights * (1.0 - logits * logits)
                d_weights = warpgroup_mma_wait(0, [d_product])
                dv_sum = warpgroup_mma(factors, d, dv, is_async=True)
                # Late, for its registers.
                shift = queries.shift.index(n % queries.COUNT).load(S)
                ds = (weights * (d_weights - shift)).to(dtype)
                if D_QUERY:
                    slopes.index(n & 1).store(ds)
                    fence_async_shared()
                    mbarrier.arrive(shared.written.index(n & 1))
                q = queries.query_of(n)
                dk_sum = warpgroup_mma(gl.convert_layout(ds, WEIGHTS), q, dk, is_async=True)
                if D_QUERY and (PARTS == 2 or (n & 1) == ME):
                    mbarrier.wait(shared.written.index(n & 1), (n >> 1) & 1)
                    from_0 = shared.slopes_0.index(n & 1)
                    from_1 = shared.slopes_1.index(n & 1)
                    if Q_BLOCK == 128:
                        from_0 = from_0.slice(ME * 64, 64, dim=1)
                        from_1 = from_1.slice(ME * 64, 64, dim=1)
                    zeros = gl.zeros([64, 64], gl.float32, DQ)
                    dq_sum = warpgroup_mma(from_0.permute((1, 0)), k_0, zeros, use_acc=False, is_async=True)
                    dq_sum = warpgroup_mma(from_1.permute((1, 0)), k_1, dq_sum, is_async=True)
                    # What was added before has to have left its place.
                    _tma.store_wait(0)
                    if AHEAD:
                        dv, dk = warpgroup_mma_wait(2, [dv_sum, dk_sum])
                        queries.release(n)
                        product = _begin_logits(queries, n + 1, n + 1 < n_end, k, nothing)
                        dq = warpgroup_mma_wait(1, [dq_sum])
                    else:
                        dv, dk, dq = warpgroup_mma_wait(0, [dv_sum, dk_sum, dq_sum])
                        queries.release(n)
                    part.store(by_threads(dq))
                    fence_async_shared()
                    place = (batch * call.HEADS * GROUP + head) * blocks + i
                    if PARTS == 2:
                        place = place * 2 + ME
                    _tma.add(results.d_query, [place * 128, 0], part)
                else:
                    dv, dk = warpgroup_mma_wait(0, [dv_sum, dk_sum])
                    queries.release(n)
                if AHEAD:
                    product = warpgroup_mma_wait(0, [product])
                i = gl.where(i + 1 < end, i + 1, first)
                n += 1
        # The values were read by this half alone, the keys by both; their gradients take their places on their way.
        dv = dv.to(dtype)
        store_rows(v, dv, results.d_value, batch, row, kv_head, 0, call.own_length, call.HEADS, results.DIM)
        mbarrier.arrive(shared.read.index(0))
        mbarrier.wait(shared.read.index(0), turn & 1)
        dk = (dk * call.SCALE).to(dtype)
        store_rows(k, dk, results.d_key, batch, row, kv_head, 0, call.own_length, call.HEADS, results.DIM)
        fence_async_shared()
        keys.release(0)
        values.release(0)
    _tma.store_wait(0)


@gluon.jit
def _begin_logits(queries, n, needed, k, nothing):
    """Begin the product of keys and queries; where it is not needed, of whatever is in their place."""
    queries.wait_for_query(n, needed)
    return warpgroup_mma(k, queries.query_of(n).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def by_threads(sums):
    """What each thread has of (64, 64), in a row of its own: (128, 32)."""
    return sums.reshape([4, 2, 8, 8, 4, 2]).permute((0, 2, 4, 3, 1, 5)).reshape([128, 32])
