"""Attention of few queries on Hopper: one warp fetches keys and values, and four or eight warps compute.

A program takes one part of the keys of a row of the batch and a key head after another. The warp that fetches is ahead
by all stages of the ring, across parts too: keys of the next part are on their way while this one ends.

Products are transposed: keys by queries, and columns of values by queries. The hardware multiplies 64 rows at a time,
by 8 columns or more. Keys and columns of values are that many; queries need only be padded to 16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ejkernel_triton.flash_attention._tile import LN2, LOG2E, LOWEST, tanh
from ejkernel_triton.flash_attention_decode_sm90._parts import Call, Results, allocate_steps


@gluon.jit
def attend(
    query, key, value, q_starts, kv_lengths, sinks,
    k_length,
    out, maxima, totals,
    PARTS: gl.constexpr, QUERIES: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr,
    V_DIM: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    STARTS: gl.constexpr, LENGTHS: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, ROWS: gl.constexpr,
    TILES: gl.constexpr, SPLITS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The results are those of the portable kernel's ``attend``."""
    # Triton makes a constant of what is 1.
    call = Call(
        q_starts, kv_lengths, gl.to_tensor(k_length), PARTS, QUERIES, HEADS, GROUP, LEFT, RIGHT, STARTS, LENGTHS, ROWS,
        TILES, SPLITS, BLOCK, WARPS,
    )  # fmt: skip
    steps = allocate_steps(key, value, STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (call, steps, query, Results(out, maxima, totals, sinks, LSE, SINKS, V_DIM), DIM, SCALE, CAP)),
            (_fetch, (call, steps, key, value)),
        ],
        [1],
        [24],
    )


@gluon.jit
def _fetch(call, steps, key, value):
    """The work of the warp that fetches: the blocks of all parts, in the order in which they are read."""
    step = 0
    for number in range(gl.program_id(0), call.PARTS, gl.num_programs(0)):
        batch, kv_head, _, _, _, first, _, block, stop = call.part(number)
        for j in range(block, stop):
            steps.fill(step, key, value, batch.to(gl.int32), first + j * call.BLOCK, kv_head)
            step += 1


@gluon.jit
def _attend(call, steps, query, results, DIM: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr):
    """The work of the warps that compute. Of four, each has 16 keys of 64, and then 16 columns of the values; eight
    are two such groups, each for half of the rows.
    """
    WIDTH: gl.constexpr = steps.keys.shape[4]
    V_WIDTH: gl.constexpr = steps.values.shape[4]
    ROWS: gl.constexpr = call.ROWS
    BLOCK: gl.constexpr = call.BLOCK
    dtype: gl.constexpr = steps.keys.dtype
    # Of both products: they have the same columns.
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, call.WARPS // 4], [16, ROWS * 4 // call.WARPS, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(0, ACC)
    # Without a soft cap, one instruction scales the logits and subtracts the maximum.
    UNIT: gl.constexpr = SCALE * LOG2E if CAP == 0 and SCALE > 1e-30 else 1.0
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [call.WARPS, 1], [1, 0])
    queries = gl.allocate_shared_memory(dtype, [ROWS, WIDTH], gl.NVMMASharedLayout(128, 16, 2))
    # The weights of a step, which the hardware reads from shared memory.
    weighing = gl.allocate_shared_memory(dtype, [ROWS, BLOCK], gl.NVMMASharedLayout(128, 16, 2))
    step = 0
    for number in range(gl.program_id(0), call.PARTS, gl.num_programs(0)):
        batch, kv_head, tile, split, q_start, first, end, block, stop = call.part(number)
        _, _, place, is_row = call.rows(batch, kv_head, tile, gl.SliceLayout(1, LINES))
        column = gl.arange(0, WIDTH, gl.SliceLayout(0, LINES))
        q = gl.load(
            query + place[:, None] * DIM + column[None, :], mask=is_row[:, None] & (column < DIM)[None, :], other=0.0
        )
        queries.store(q)
        fence_async_shared()
        index, head, place, is_row = call.rows(batch, kv_head, tile, OF_ROWS)
        q_position = q_start + index
        # The keys that all queries see.
        full, full_end = first, end
        if call.QUERIES > 1 and call.LEFT >= 0:
            full = gl.maximum(first, q_start + (call.QUERIES - 1 - call.LEFT))
        if call.QUERIES > 1 and call.RIGHT >= 0:
            full_end = gl.minimum(end, q_start + (call.RIGHT + 1))
        row_max = gl.full([ROWS], LOWEST, gl.float32, OF_ROWS)
        row_sum = _partial_sums(gl.zeros([BLOCK, ROWS], gl.float32, ACC))
        sums = gl.zeros([V_WIDTH, ROWS], gl.float32, ACC)
        for j in range(block, stop):
            slot = first + j * BLOCK
            k = steps.wait_for_keys(step)
            zeros = gl.zeros([BLOCK, ROWS], gl.float32, ACC)
            product = warpgroup_mma(k, queries.permute((1, 0)), zeros, use_acc=False, is_async=True)
            logits = warpgroup_mma_wait(0, [product])
            if CAP > 0:
                logits = tanh(logits * (SCALE / CAP), CAP) * (CAP * LOG2E)
            elif SCALE <= 1e-30:
                logits = logits * (SCALE * LOG2E)
            if (slot < full) | (slot + BLOCK > full_end):
                logits = gl.where(_is_visible(call, slot, end, q_position, ACC), logits, -float("inf"))
            new_max = gl.maximum(row_max, gl.max(logits, 0) * UNIT)
            rescale = gl.exp2(row_max - new_max)
            weights = gl.exp2(logits * UNIT - new_max[None, :])
            row_sum = _rescaled(row_sum, rescale) + _partial_sums(weights)
            row_max = new_max
            weighing.permute((1, 0)).store(weights.to(dtype))
            v = steps.wait_for_values(step)
            if slot + BLOCK > end:
                # What stands there may be NaN, for which a weight of 0 is not enough.
                _clear(v, end - slot, call.WARPS)
            fence_async_shared()
            product = warpgroup_mma(v.permute((1, 0)), weighing.permute((1, 0)), sums * rescale[None, :], is_async=True)
            sums = warpgroup_mma_wait(0, [product])
            steps.release(step)
            step += 1
        total = gl.convert_layout(gl.sum(gl.sum(row_sum, 0), 0), OF_ROWS)
        _store(call, results, index, head, place, is_row, split, block < stop, row_max, total, sums)


@gluon.jit
def _store(call, results, query, head, place, is_row, split, has_keys, row_max, total, sums):
    """Store the sums of a part, or the results. A thread has columns of eight that are next to each other in memory."""
    V_WIDTH: gl.constexpr = sums.shape[0]
    column = gl.arange(0, V_WIDTH, gl.SliceLayout(1, sums.type.layout))
    is_entry = (column < results.V_DIM)[:, None] & is_row[None, :]
    if call.SPLITS == 1:
        sink, sink_max = _sinks_of(results, head)
        new_max = gl.maximum(row_max, sink_max)
        rescale = gl.exp2(row_max - new_max)
        total = total * rescale + sink * gl.exp2(sink_max - new_max)
        sums = sums * (rescale * gl.where(total != 0, 1.0 / total, 0.0))[None, :]
        pointers = results.out + place[None, :] * results.V_DIM + column[:, None]
        gl.store(pointers, sums.to(results.out.dtype.element_ty), mask=is_entry)
        if results.LSE:
            lse = gl.where(total != 0, (new_max + gl.log2(total)) * LN2, -float("inf"))
            batch = place // (call.QUERIES * call.HEADS)
            gl.store(results.maxima + (batch * call.HEADS + head) * call.QUERIES + query, lse, mask=is_row)
    else:
        part = place * call.SPLITS + split
        # The sums of a split without keys are not read.
        pointers = results.out + part[None, :] * results.V_DIM + column[:, None]
        gl.store(pointers, sums, mask=is_entry & has_keys)
        gl.store(results.maxima + part, row_max, mask=is_row)
        gl.store(results.totals + part, total, mask=is_row)


@gluon.jit
def _is_visible(call, slot, end, q_position, layout: gl.constexpr):
    """Whether each query sees each of the keys from ``slot`` on: (keys, queries)."""
    position = slot + gl.arange(0, call.BLOCK, gl.SliceLayout(1, layout))
    visible = (position < end)[:, None] & gl.full([call.BLOCK, call.ROWS], True, gl.int1, layout)
    if call.QUERIES > 1 and call.LEFT >= 0:
        visible = visible & (position[:, None] >= (q_position - call.LEFT)[None, :])
    if call.QUERIES > 1 and call.RIGHT >= 0:
        visible = visible & (position[:, None] <= (q_position + call.RIGHT)[None, :])
    return visible


@gluon.jit
def _clear(tile, count, WARPS: gl.constexpr):
    """Set the rows from ``count`` on to 0."""
    WIDTH: gl.constexpr = tile.shape[1]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, LINES))
    values = tile.load(LINES)
    tile.store(gl.where((row < count)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _partial_sums(weights):
    """(4, 8, rows): for each row the sums of the weights of each thread. They are added up once a part."""
    BLOCK: gl.constexpr = weights.shape[0]
    ROWS: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(weights.reshape([BLOCK // 64, 4, 2, 8, ROWS]), 2), 0)


@gluon.jit
def _rescaled(row_sum, rescale):
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, row_sum.type.layout))
    return row_sum * gl.convert_layout(rescale, layout)[None, None, :]


@gluon.jit
def _sinks_of(results, head):
    """For the head of each row, the sum of the exponentials of its sinks relative to the largest of them, and that one
    in units of log2.
    """
    total = head * 0.0
    largest = total + LOWEST
    if results.SINKS > 0:
        first = results.sinks + head * results.SINKS
        highest = total + LOWEST / 2
        for i in range(results.SINKS):
            highest = gl.maximum(highest, gl.load(first + i).to(gl.float32))
        # Subtract before scaling: the difference of two rounded products would have a large relative error.
        for i in range(results.SINKS):
            total += gl.exp2((gl.load(first + i).to(gl.float32) - highest) * LOG2E)
        largest = highest * LOG2E
    return total, largest
