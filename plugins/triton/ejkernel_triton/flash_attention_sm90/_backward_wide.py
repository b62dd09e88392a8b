"""The backward pass for head dims over 128, whose sums fit into two groups of warps only if they share the dims.

A program keeps 64 keys and their values. Each group computes the weights of half of a block of queries and stores them
in shared memory, from which both groups read all of them. Each group sums half of the dims of every gradient, for keys
and values in registers. Its half of the gradient of queries is added to memory as in `_backward`. On its way it
overwrites the same half of the dims of the queries and of the output's gradients, because there is no other shared
memory left. This is safe: a group reads the other's half only before it signals that its weights are stored.
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

from ejkernel_triton.flash_attention_sm90._backward import (
    Results,
    Sources,
    allocate_queries,
    fetch_queries,
    first_block,
    to_rows_of_threads,
    weights_and_logits,
)
from ejkernel_triton.flash_attention_sm90._shared import (
    Call,
    allocate_ring,
    apply_soft_cap,
    clear_empty_slots,
    own_tokens,
    store_rows,
)
from ejkernel_triton.gluon import tma
from ejkernel_triton.gluon.shared_memory import barriers, reinterpret


@aggregate
class Shared:
    """The weights and the gradients of logits that each group computes for both, alternating between two slots, and the
    barriers for them. Once both groups have written those of a step, both have read those of the step before.
    """

    weights: gl.shared_memory_descriptor
    d_logits: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, weights, d_logits, full):
        self.weights = weights
        self.d_logits = d_logits
        self.full = full


@gluon.jit
def sum_over_queries_of_wide_heads(
    query, key, value, d_out, lse, delta, d_query, schedule, ranges, starts, stops, k_ids, q_ids,
    q_length, k_length, schedule_width, ranges_stride,
    d_key, d_value,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr, SCALE: gl.constexpr,
    CAP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PACKED: gl.constexpr, SEGMENTS: gl.constexpr,
    START: gl.constexpr, LENGTHS: gl.constexpr, SLOTS: gl.constexpr,
    Q_BLOCK: gl.constexpr, STAGES: gl.constexpr, D_QUERY: gl.constexpr,
):  # fmt: skip
    """Like `_backward.sum_over_queries`."""
    KV_HEADS: gl.constexpr = HEADS // GROUP
    # The gradient of queries passes through their slot, while the groups work on the next slot.
    gl.static_assert(STAGES == 2)
    call = Call(
        # Triton makes a constant of what is 1.
        gl.to_tensor(k_length), gl.to_tensor(q_length), schedule, gl.to_tensor(schedule_width),
        ranges, gl.to_tensor(ranges_stride), starts, stops, k_ids, q_ids, KV_HEADS, SCALE, CAP, LEFT, RIGHT, PACKED,
        SEGMENTS, START, LENGTHS, SLOTS, False, CAP > 0 or START, WIDTH, 64, Q_BLOCK,
    )  # fmt: skip
    dtype: gl.constexpr = query.dtype
    sources = Sources(query, d_out, lse, delta, HEADS)
    results = Results(d_key, d_value, d_query, DIM)
    keys = allocate_ring(key, 1, 2)
    values = allocate_ring(value, 1, 2)
    queries = allocate_queries(query, lse, STAGES)
    # Two halves of 32 queries, one for each group.
    halves: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    shared = Shared(
        gl.allocate_shared_memory(dtype, [2, 64, Q_BLOCK], halves),
        gl.allocate_shared_memory(dtype, [2, 64, Q_BLOCK], halves),
        barriers(2, 2),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (_warp_group_0, (call, keys, values, queries, shared, results, GROUP, D_QUERY)),
            (_warp_group_1, (call, keys, values, queries, shared, results, GROUP, D_QUERY)),
            (_fetch, (call, keys, values, queries, key, value, sources, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _fetch(call, keys, values, queries, key, value, sources, GROUP: gl.constexpr):
    """The work of the warp that fetches: all tiles, in the order in which the other warps read them."""
    n = 0
    for t in range(call.tile_count()):
        batch, kv_head, block = call.tile(t)
        keys.fill(t, key, [batch, block * call.OWN_BLOCK, kv_head, 0])
        values.fill(t, value, [batch, block * call.OWN_BLOCK, kv_head, 0])
        n = fetch_queries(call, n, batch, kv_head, block, queries, sources, GROUP)


@gluon.jit
def _warp_group_0(call, keys, values, queries, shared, results, GROUP: gl.constexpr, D_QUERY: gl.constexpr):
    _sum(0, call, keys, values, queries, shared, results, GROUP, D_QUERY)


@gluon.jit
def _warp_group_1(call, keys, values, queries, shared, results, GROUP: gl.constexpr, D_QUERY: gl.constexpr):
    _sum(1, call, keys, values, queries, shared, results, GROUP, D_QUERY)


@gluon.jit
def _sum(
    WARP_GROUP: gl.constexpr, call, keys, values, queries, shared, results, GROUP: gl.constexpr, D_QUERY: gl.constexpr
):  # fmt: skip
    """The work of a group of four warps: the weights of 32 queries of each block, and half of the dims of gradients."""
    WIDTH: gl.constexpr = call.WIDTH
    HALF: gl.constexpr = WIDTH // 2
    Q_BLOCK: gl.constexpr = call.OTHER_BLOCK
    ROWS: gl.constexpr = Q_BLOCK // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    blocks = gl.cdiv(call.other_length, Q_BLOCK)
    dtype: gl.constexpr = keys.tiles.dtype
    k = keys.tile(0).reshape([64, WIDTH])
    v = values.tile(0).reshape([64, WIDTH])
    zero_logits = gl.zeros([64, ROWS], gl.float32, S)
    n = 0
    for t in range(call.tile_count()):
        batch, kv_head, block = call.tile(t)
        first, full, full_end, end = call.block_range(batch, block)
        row = block * call.OWN_BLOCK
        own = own_tokens(call, batch, row, 64, gl.SliceLayout(1, S))
        dk = gl.zeros([64, HALF], gl.float32, D)
        dv = gl.zeros([64, HALF], gl.float32, D)
        keys.wait(t)
        values.wait(t)
        # Both groups clear all of it. Without a step, one could write its gradients meanwhile.
        if (call.LENGTHS or call.SLOTS) and first < end:
            clear_empty_slots(call, batch, row, call.own_length, v)
            clear_empty_slots(call, batch, row, call.own_length, k)
        for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
            i = first_block(call, block, first, end)
            for _ in range(first, end):
                queries.wait_for_query(n)
                q = queries.query_of(n)
                half = q.slice(WARP_GROUP * ROWS, ROWS, dim=0)
                product = warpgroup_mma(k, half.permute((1, 0)), zero_logits, use_acc=False, is_async=True)
                queries.wait_for_d_out(n)
                d = queries.d_out_of(n)
                half = d.slice(WARP_GROUP * ROWS, ROWS, dim=0)
                d_product = warpgroup_mma(v, half.permute((1, 0)), zero_logits, use_acc=False, is_async=True)
                row_lse = queries.lse.index(n % queries.COUNT).slice(WARP_GROUP * ROWS, ROWS, dim=1).load(S)
                logits = apply_soft_cap(call, warpgroup_mma_wait(1, [product]))
                is_partial = (i < full) | (i >= full_end)
                weights, logits = weights_and_logits(
                    call, own, batch, i * Q_BLOCK + WARP_GROUP * ROWS, is_partial, logits, row_lse
                )
                shared.weights.index(n & 1).slice(WARP_GROUP * ROWS, ROWS, dim=1).store(weights.to(dtype))
                if call.CAP > 0:
                    weights = weights * (1.0 - logits * logits)
                row_delta = queries.delta.index(n % queries.COUNT).slice(WARP_GROUP * ROWS, ROWS, dim=1).load(S)
                d_weights = warpgroup_mma_wait(0, [d_product])
                d_logits_tile = (weights * (d_weights - row_delta)).to(dtype)
                shared.d_logits.index(n & 1).slice(WARP_GROUP * ROWS, ROWS, dim=1).store(d_logits_tile)
                if D_QUERY and n > 0:
                    # The slot of the queries before is empty once their gradient has been read from it.
                    tma.store_wait(0)
                    queries.release(n - 1)
                fence_async_shared()
                mbarrier.arrive(shared.full.index(n & 1))
                mbarrier.wait(shared.full.index(n & 1), (n >> 1) & 1)
                d_logits = shared.d_logits.index(n & 1)
                half = d.slice(WARP_GROUP * HALF, HALF, dim=1)
                dv_sum = warpgroup_mma(shared.weights.index(n & 1), half, dv, is_async=True)
                half = q.slice(WARP_GROUP * HALF, HALF, dim=1)
                dk_sum = warpgroup_mma(d_logits, half, dk, is_async=True)
                if D_QUERY:
                    zero_dq = gl.zeros([64, 64], gl.float32, DQ)
                    low = k.slice(WARP_GROUP * HALF, 64, dim=1)
                    high = k.slice(WARP_GROUP * HALF + 64, 64, dim=1)
                    d_logits = d_logits.permute((1, 0))
                    low_product = warpgroup_mma(d_logits, low, zero_dq, use_acc=False, is_async=True)
                    high_product = warpgroup_mma(d_logits, high, zero_dq, use_acc=False, is_async=True)
                    dv, dk, low_dq, high_dq = warpgroup_mma_wait(0, [dv_sum, dk_sum, low_product, high_product])
                    tile = ((batch * call.HEADS * GROUP + head) * blocks + i) * (WIDTH // 64) + WARP_GROUP * 2
                    low_tile = _halves(queries.query.index(n % queries.COUNT), results).index(WARP_GROUP)
                    high_tile = _halves(queries.d_out.index(n % queries.COUNT), results).index(WARP_GROUP)
                    low_tile.store(to_rows_of_threads(low_dq))
                    high_tile.store(to_rows_of_threads(high_dq))
                    fence_async_shared()
                    tma.add(results.d_query, [tile * 128, 0], low_tile)
                    tma.add(results.d_query, [tile * 128 + 128, 0], high_tile)
                else:
                    dv, dk = warpgroup_mma_wait(0, [dv_sum, dk_sum])
                    queries.release(n)
                i = gl.where(i + 1 < end, i + 1, first)
                n += 1
        # The gradients pass through the shared memory of this half of the dims of keys and values, which this group has
        # read last.
        dv = dv.to(dtype)
        half = v.slice(WARP_GROUP * HALF, HALF, dim=1)
        dim = WARP_GROUP * HALF
        store_rows(half, dv, results.d_value, batch, row, kv_head, dim, call.own_length, call.HEADS, results.DIM)
        dk = (dk * call.SCALE).to(dtype)
        half = k.slice(WARP_GROUP * HALF, HALF, dim=1)
        store_rows(half, dk, results.d_key, batch, row, kv_head, dim, call.own_length, call.HEADS, results.DIM)
        fence_async_shared()
        keys.release(0)
        values.release(0)
    tma.store_wait(0)


@gluon.jit
def _halves(block, results):
    """The two halves of the dims of a block, each as large as one tile of their gradient."""
    return reinterpret(block, results.d_query.dtype, [2] + results.d_query.block_shape, results.d_query.layout)
