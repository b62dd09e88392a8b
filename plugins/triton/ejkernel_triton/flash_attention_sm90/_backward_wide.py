"""The backward pass for head dims over 128, whose sums two groups of warps hold only if they share the dims.

A program keeps 64 keys with their values. Each group computes the weights of half of a block of queries, in shared
memory both find those of all, and each sums up half of the dims of every gradient: those of keys and values in
registers. Its half of the gradient of queries goes to memory as in ``_backward``, by way of the places of the same half
of the dims of the queries and of the output's gradients: there is no room for others. The other group has read these
before it said that its weights are written; what is read of them after that is one's own half.
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
from ejkernel_triton.flash_attention_sm90._backward import (
    Results,
    Sources,
    begin,
    by_threads,
    fetch_queries,
    queries_of,
    weigh,
)
from ejkernel_triton.flash_attention_sm90._shared import (
    Call,
    barriers,
    bent,
    own_tokens,
    reinterpreted,
    ring,
    store_rows,
)


@aggregate
class Shared:
    """What each group computes for both, by turns in one of two places, and when it was written. Whoever knows that all
    of a step is written has read all of the step before, and so has the other.
    """

    weights: gl.shared_memory_descriptor
    slopes: gl.shared_memory_descriptor
    written: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, weights, slopes, written):
        self.weights = weights
        self.slopes = slopes
        self.written = written


@gluon.jit
def sum_over_queries_of_wide_heads(
    query, key, value, d_out, tops, shifts, d_query, schedule, sight, starts, stops, k_ids, q_ids,
    q_length, k_length, schedule_width, sight_batch,
    d_key, d_value,
    HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr, SCALE: gl.constexpr,
    CAP: gl.constexpr, BEFORE: gl.constexpr, AFTER: gl.constexpr, PACKED: gl.constexpr, SEGMENTS: gl.constexpr,
    Q_BLOCK: gl.constexpr, STAGES: gl.constexpr, D_QUERY: gl.constexpr,
):  # fmt: skip
    """As ``_backward.sum_over_queries``."""
    KV: gl.constexpr = HEADS // GROUP
    # The gradient of queries leaves by their places, while the next ones are worked on.
    gl.static_assert(STAGES == 2)
    call = Call(
        # Triton makes a constant of what is 1.
        gl.to_tensor(k_length), gl.to_tensor(q_length), schedule, gl.to_tensor(schedule_width),
        sight, gl.to_tensor(sight_batch), starts, stops, k_ids, q_ids, KV, SCALE, CAP, BEFORE, AFTER, PACKED, SEGMENTS,
        CAP > 0, WIDTH, 64, Q_BLOCK,
    )  # fmt: skip
    dtype: gl.constexpr = query.dtype
    sources = Sources(query, d_out, tops, shifts, HEADS)
    results = Results(d_key, d_value, d_query, DIM)
    keys = ring(key, 1, 2)
    values = ring(value, 1, 2)
    queries = queries_of(query, tops, STAGES)
    # Made of parts of 32 queries, one for each group.
    halves: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    shared = Shared(
        gl.allocate_shared_memory(dtype, [2, 64, Q_BLOCK], halves),
        gl.allocate_shared_memory(dtype, [2, 64, Q_BLOCK], halves),
        barriers(2, 2),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (_half_0, (call, keys, values, queries, shared, results, GROUP, D_QUERY)),
            (_half_1, (call, keys, values, queries, shared, results, GROUP, D_QUERY)),
            (_fetch, (call, keys, values, queries, key, value, sources, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _fetch(call, keys, values, queries, key, value, sources, GROUP: gl.constexpr):
    """One warp: everything that the others need, in the order in which they need it."""
    n = 0
    for turn in range(call.turns()):
        batch, kv_head, block = call.tile(turn)
        keys.fill(turn, key, [batch, block * call.OWN_BLOCK, kv_head, 0])
        values.fill(turn, value, [batch, block * call.OWN_BLOCK, kv_head, 0])
        n = fetch_queries(call, n, batch, kv_head, block, queries, sources, GROUP)


@gluon.jit
def _half_0(call, keys, values, queries, shared, results, GROUP: gl.constexpr, D_QUERY: gl.constexpr):
    _sum(0, call, keys, values, queries, shared, results, GROUP, D_QUERY)


@gluon.jit
def _half_1(call, keys, values, queries, shared, results, GROUP: gl.constexpr, D_QUERY: gl.constexpr):
    _sum(1, call, keys, values, queries, shared, results, GROUP, D_QUERY)


@gluon.jit
def _sum(
    ME: gl.constexpr, call, keys, values, queries, shared, results, GROUP: gl.constexpr, D_QUERY: gl.constexpr
):  # fmt: skip
    """Four warps: the weights of 32 queries of each block, and half of the dims of the gradients."""
    WIDTH: gl.constexpr = call.WIDTH
    HALF: gl.constexpr = WIDTH // 2
    Q_BLOCK: gl.constexpr = call.OTHER_BLOCK
    MINE: gl.constexpr = Q_BLOCK // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MINE, 16])
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    blocks = gl.cdiv(call.other_length, Q_BLOCK)
    dtype: gl.constexpr = keys.tiles.dtype
    k = keys.at(0).reshape([64, WIDTH])
    v = values.at(0).reshape([64, WIDTH])
    nothing = gl.zeros([64, MINE], gl.float32, S)
    n = 0
    for turn in range(call.turns()):
        batch, kv_head, block = call.tile(turn)
        first, whole, whole_end, end = call.blocks_seen(batch, block)
        row = block * call.OWN_BLOCK
        own = own_tokens(call, batch, row, 64, gl.SliceLayout(1, S))
        dk = gl.zeros([64, HALF], gl.float32, D)
        dv = gl.zeros([64, HALF], gl.float32, D)
        keys.wait(turn)
        values.wait(turn)
        for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
            i = begin(call, block, first, end)
            for _ in range(first, end):
                queries.wait_for_query(n)
                q = queries.query_of(n)
                mine = q.slice(ME * MINE, MINE, dim=0)
                product = warpgroup_mma(k, mine.permute((1, 0)), nothing, use_acc=False, is_async=True)
                queries.wait_for_d_out(n)
                d = queries.d_out_of(n)
                mine = d.slice(ME * MINE, MINE, dim=0)
                d_product = warpgroup_mma(v, mine.permute((1, 0)), nothing, use_acc=False, is_async=True)
                top = queries.top.index(n % queries.COUNT).slice(ME * MINE, MINE, dim=1).load(S)
                logits = bent(call, warpgroup_mma_wait(1, [product]))
                edge = (i < whole) | (i >= whole_end)
                weights, logits = weigh(call, own, batch, i * Q_BLOCK + ME * MINE, edge, logits, top)
                shared.weights.index(n & 1).slice(ME * MINE, MINE, dim=1).store(weights.to(dtype))
                if call.CAP > 0:
                    weights = weights * (1.0 - logits * logits)
                shift = queries.shift.index(n % queries.COUNT).slice(ME * MINE, MINE, dim=1).load(S)
                d_weights = warpgroup_mma_wait(0, [d_product])
                ds = (weights * (d_weights - shift)).to(dtype)
                shared.slopes.index(n & 1).slice(ME * MINE, MINE, dim=1).store(ds)
                if D_QUERY and n > 0:
                    # The places of the queries before are free once their gradient has left them; the last ones stay.
                    _tma.store_wait(0)
                    queries.release(n - 1)
                fence_async_shared()
                mbarrier.arrive(shared.written.index(n & 1))
                mbarrier.wait(shared.written.index(n & 1), (n >> 1) & 1)
                slopes = shared.slopes.index(n & 1)
                half = d.slice(ME * HALF, HALF, dim=1)
                dv_sum = warpgroup_mma(shared.weights.index(n & 1), half, dv, is_async=True)
                half = q.slice(ME * HALF, HALF, dim=1)
                dk_sum = warpgroup_mma(slopes, half, dk, is_async=True)
                if D_QUERY:
                    zeros = gl.zeros([64, 64], gl.float32, DQ)
                    near = k.slice(ME * HALF, 64, dim=1)
                    far = k.slice(ME * HALF + 64, 64, dim=1)
                    slopes = slopes.permute((1, 0))
                    near_sum = warpgroup_mma(slopes, near, zeros, use_acc=False, is_async=True)
                    far_sum = warpgroup_mma(slopes, far, zeros, use_acc=False, is_async=True)
                    dv, dk, near_dq, far_dq = warpgroup_mma_wait(0, [dv_sum, dk_sum, near_sum, far_sum])
                    place = ((batch * call.HEADS * GROUP + head) * blocks + i) * (WIDTH // 64) + ME * 2
                    near_part = _halves(queries.query.index(n % queries.COUNT), results).index(ME)
                    far_part = _halves(queries.d_out.index(n % queries.COUNT), results).index(ME)
                    near_part.store(by_threads(near_dq))
                    far_part.store(by_threads(far_dq))
                    fence_async_shared()
                    _tma.add(results.d_query, [place * 128, 0], near_part)
                    _tma.add(results.d_query, [place * 128 + 128, 0], far_part)
                else:
                    dv, dk = warpgroup_mma_wait(0, [dv_sum, dk_sum])
                    queries.release(n)
                i = gl.where(i + 1 < end, i + 1, first)
                n += 1
        # Of keys and values this half of the dims was read last by this group: its gradients take their places on
        # their way.
        dv = dv.to(dtype)
        mine = v.slice(ME * HALF, HALF, dim=1)
        at = ME * HALF
        store_rows(mine, dv, results.d_value, batch, row, kv_head, at, call.own_length, call.HEADS, results.DIM)
        dk = (dk * call.SCALE).to(dtype)
        mine = k.slice(ME * HALF, HALF, dim=1)
        store_rows(mine, dk, results.d_key, batch, row, kv_head, at, call.own_length, call.HEADS, results.DIM)
        fence_async_shared()
        keys.release(0)
        values.release(0)
    _tma.store_wait(0)


@gluon.jit
def _halves(place, results):
    """Of the dims of a block, each as large as one tile of their gradient."""
    return reinterpreted(place, results.d_query.dtype, [2] + results.d_query.block_shape, results.d_query.layout)
