"""Attention of few queries on Hopper: one warp fetches keys and values, and others compute.

A program takes one part of the keys of a row of the batch and a key head after another. The warp that fetches is ahead
by all stages of the ring, across parts too: keys of the next part are on their way while this one ends. If the queries
of a key head are several tiles, two groups of warps read each block that is fetched, each for a tile.

The hardware multiplies 64 rows at a time, by 8 columns or more. Of tiles with 64 queries these are the rows. With fewer
both products are transposed: keys by queries, and columns of values by queries. Keys and columns of values are that
many; queries need only be padded to 16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ejkernel_triton.flash_attention._tile import LN2, LOG2E, LOWEST, tanh
from ejkernel_triton.hopper.shared_memory import wait_for_group


@gluon.jit
def attend(call, steps, key, value, query, results, DIM: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr):
    """Compute all parts of a program. ``call`` says which these are, and fetches their keys and values."""
    if call.TOGETHER == 2:
        gl.warp_specialize(
            [
                (_attend_first, (call, steps, query, results, DIM, SCALE, CAP)),
                (_attend_second, (call, steps, query, results, DIM, SCALE, CAP)),
                (_fetch, (call, steps, key, value)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend_first, (call, steps, query, results, DIM, SCALE, CAP)),
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
        step = call.fetch(steps, step, key, value, call.part(number))


@gluon.jit
def _attend_first(call, steps, query, results, DIM: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr):
    _attend(call, steps, query, results, 0, DIM, SCALE, CAP)


@gluon.jit
def _attend_second(call, steps, query, results, DIM: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr):
    _attend(call, steps, query, results, 1, DIM, SCALE, CAP)


@gluon.jit
def _attend(call, steps, query, results, OWN: gl.constexpr, DIM: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr):
    """The work of the warps that compute, for one of the tiles of each part."""
    # Without a soft cap, one instruction scales the logits and subtracts the maximum.
    UNIT: gl.constexpr = SCALE * LOG2E if CAP == 0 and SCALE > 1e-30 else 1.0
    queries = gl.allocate_shared_memory(
        steps.keys.dtype, [call.ROWS, steps.keys.shape[4]], gl.NVMMASharedLayout(128, 16, 2)
    )
    if call.ROWS == 64:
        _attend_rows(call, steps, query, queries, results, OWN, DIM, SCALE, CAP, UNIT)
    else:
        _attend_columns(call, steps, query, queries, results, OWN, DIM, SCALE, CAP, UNIT)


@gluon.jit
def _attend_columns(
    call, steps, query, queries, results, OWN: gl.constexpr, DIM: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr,
    UNIT: gl.constexpr,
):  # fmt: skip
    """With queries as columns. Of four warps, each has 16 keys of 64, and then 16 columns of the values; eight are two
    such groups, each for half of the queries.
    """
    V_WIDTH: gl.constexpr = steps.values.shape[4]
    ROWS: gl.constexpr = call.ROWS
    BLOCK: gl.constexpr = call.BLOCK
    dtype: gl.constexpr = steps.keys.dtype
    # Of both products: they have the same columns.
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, call.WARPS // 4], [16, ROWS * 4 // call.WARPS, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(0, ACC)
    # The weights of a step, which the hardware reads from shared memory.
    weighing = gl.allocate_shared_memory(dtype, [ROWS, BLOCK], gl.NVMMASharedLayout(128, 16, 2))
    step = 0
    for number in range(gl.program_id(0), call.PARTS, gl.num_programs(0)):
        part = call.part(number)
        _load_queries(call, query, queries, part, OWN, DIM)
        index, head, place, is_row = call.rows(part, OWN, OF_ROWS)
        q_position = part.q_start + index
        full, full_end = call.seen_by_all(part)
        row_max = gl.full([ROWS], LOWEST, gl.float32, OF_ROWS)
        row_sum = _partial_sums(gl.zeros([BLOCK, ROWS], gl.float32, ACC))
        sums = gl.zeros([V_WIDTH, ROWS], gl.float32, ACC)
        for j in range(part.block, part.stop):
            slot = part.origin + j * BLOCK
            k = steps.wait_for_keys(step)
            zeros = gl.zeros([BLOCK, ROWS], gl.float32, ACC)
            product = warpgroup_mma(k, queries.permute((1, 0)), zeros, use_acc=False, is_async=True)
            logits = _scaled(warpgroup_mma_wait(0, [product]), SCALE, CAP)
            if (slot < full) | (slot + BLOCK > full_end):
                position = slot + gl.arange(0, BLOCK, gl.SliceLayout(1, ACC))
                visible = gl.full([BLOCK, ROWS], True, gl.int1, ACC)
                visible = call.visible(visible, position[:, None], part.end, q_position[None, :])
                logits = gl.where(visible, logits, -float("inf"))
            new_max = gl.maximum(row_max, gl.max(logits, 0) * UNIT)
            rescale = gl.exp2(row_max - new_max)
            weights = gl.exp2(logits * UNIT - new_max[None, :])
            row_sum = _rescaled(row_sum, rescale) + _partial_sums(weights)
            row_max = new_max
            weighing.permute((1, 0)).store(weights.to(dtype))
            v = _values(call, steps, step, part.end - slot)
            fence_async_shared()
            product = warpgroup_mma(v.permute((1, 0)), weighing.permute((1, 0)), sums * rescale[None, :], is_async=True)
            sums = warpgroup_mma_wait(0, [product])
            steps.release(step)
            step += 1
        total = gl.convert_layout(gl.sum(gl.sum(row_sum, 0), 0), OF_ROWS)
        _store(call, results, part, OWN, index, head, place, is_row, row_max, total, sums)


@gluon.jit
def _attend_rows(
    call, steps, query, queries, results, OWN: gl.constexpr, DIM: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr,
    UNIT: gl.constexpr,
):  # fmt: skip
    """With queries as rows, 16 for each of four warps. The weights stay in registers, and are multiplied with their
    values at the same time as the next keys with the queries.
    """
    V_WIDTH: gl.constexpr = steps.values.shape[4]
    ROWS: gl.constexpr = call.ROWS
    dtype: gl.constexpr = steps.keys.dtype
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.BLOCK, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_WIDTH, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    step = 0
    for number in range(gl.program_id(0), call.PARTS, gl.num_programs(0)):
        part = call.part(number)
        _load_queries(call, query, queries, part, OWN, DIM)
        index, _, _, _ = call.rows(part, OWN, OF_ROWS)
        q_position = part.q_start + index
        full, full_end = call.seen_by_all(part)
        row_max = gl.full([ROWS], LOWEST, gl.float32, OF_ROWS)
        row_sum = gl.zeros([ROWS], gl.float32, OF_ROWS)
        sums = gl.zeros([ROWS, V_WIDTH], gl.float32, SUMS)
        if part.block < part.stop:
            product = _start_logits(call, steps, step, queries, LOGITS)
            logits = warpgroup_mma_wait(0, [product])
            logits = _masked(call, part, logits, part.block, full, full_end, q_position, SCALE, CAP)
            row_max, row_sum, rescale, weights = _softmax_step(logits, row_max, row_sum, UNIT)
            weights = gl.convert_layout(weights.to(dtype), WEIGHTS)
            for j in range(part.block + 1, part.stop):
                product = _start_logits(call, steps, step + 1, queries, LOGITS)
                # Only the last block has slots without a value.
                weighted = warpgroup_mma(weights, steps.wait_for_values(step), sums, is_async=True)
                logits = warpgroup_mma_wait(1, [product])
                logits = _masked(call, part, logits, j, full, full_end, q_position, SCALE, CAP)
                row_max, row_sum, rescale, next_weights = _softmax_step(logits, row_max, row_sum, UNIT)
                sums = warpgroup_mma_wait(0, [weighted])
                steps.release(step)
                sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
                weights = gl.convert_layout(next_weights.to(dtype), WEIGHTS)
                step += 1
            v = _values(call, steps, step, part.end - (part.origin + (part.stop - 1) * call.BLOCK))
            sums = warpgroup_mma_wait(0, [warpgroup_mma(weights, v, sums, is_async=True)])
            steps.release(step)
            step += 1
        sums = sums.permute((1, 0))
        COLUMNS: gl.constexpr = sums.type.layout
        row_max = gl.convert_layout(row_max, gl.SliceLayout(0, COLUMNS))
        total = gl.convert_layout(row_sum, gl.SliceLayout(0, COLUMNS))
        index, head, place, is_row = call.rows(part, OWN, gl.SliceLayout(0, COLUMNS))
        _store(call, results, part, OWN, index, head, place, is_row, row_max, total, sums)


@gluon.jit
def _start_logits(call, steps, step, queries, LOGITS: gl.constexpr):
    zeros = gl.zeros([call.ROWS, call.BLOCK], gl.float32, LOGITS)
    k = steps.wait_for_keys(step)
    return warpgroup_mma(queries, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _masked(call, part, logits, j, full, full_end, q_position, SCALE: gl.constexpr, CAP: gl.constexpr):
    """The logits of block ``j``, scaled, as (queries, keys)."""
    LOGITS: gl.constexpr = logits.type.layout
    slot = part.origin + j * call.BLOCK
    logits = _scaled(logits, SCALE, CAP)
    if (slot < full) | (slot + call.BLOCK > full_end):
        position = slot + gl.arange(0, call.BLOCK, gl.SliceLayout(0, LOGITS))
        visible = gl.full([call.ROWS, call.BLOCK], True, gl.int1, LOGITS)
        visible = call.visible(visible, position[None, :], part.end, q_position[:, None])
        logits = gl.where(visible, logits, -float("inf"))
    return logits


@gluon.jit
def _softmax_step(logits, row_max, row_sum, UNIT: gl.constexpr):
    new_max = gl.maximum(row_max, gl.max(logits, 1) * UNIT)
    rescale = gl.exp2(row_max - new_max)
    weights = gl.exp2(logits * UNIT - new_max[:, None])
    return new_max, row_sum * rescale + gl.sum(weights, 1), rescale, weights


@gluon.jit
def _load_queries(call, query, queries, part, OWN: gl.constexpr, DIM: gl.constexpr):
    """Copy the queries of a tile into shared memory."""
    WIDTH: gl.constexpr = queries.shape[1]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [call.WARPS, 1], [1, 0])
    _, _, place, is_row = call.rows(part, OWN, gl.SliceLayout(1, LINES))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, LINES))
    is_entry = is_row[:, None] & (column < DIM)[None, :]
    queries.store(gl.load(query + place[:, None] * DIM + column[None, :], mask=is_entry, other=0.0))
    fence_async_shared()


@gluon.jit
def _scaled(logits, SCALE: gl.constexpr, CAP: gl.constexpr):
    """The logits in units of log2, except for a scale that one instruction multiplies with later."""
    if CAP > 0:
        logits = tanh(logits * (SCALE / CAP), CAP) * (CAP * LOG2E)
    elif SCALE <= 1e-30:
        logits = logits * (SCALE * LOG2E)
    return logits


@gluon.jit
def _values(call, steps, step, count):
    """The values of a step, when they are there: those from ``count`` on are set to 0. What stands there may be NaN,
    for which a weight of 0 is not enough.
    """
    v = steps.wait_for_values(step)
    if count < call.BLOCK:
        _clear(v, count, call.WARPS)
        fence_async_shared()
        wait_for_group()
    return v


@gluon.jit
def _store(call, results, part, OWN: gl.constexpr, query, head, place, is_row, row_max, total, sums):
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
            gl.store(results.maxima + call.place_of_lse(place, head, query), lse, mask=is_row)
        call.clear_other_rows(results, OWN, part, sums)
    else:
        entry = place * call.SPLITS + part.split
        # The sums of a split without keys are not read.
        pointers = results.out + entry[None, :] * results.V_DIM + column[:, None]
        gl.store(pointers, sums, mask=is_entry & (part.block < part.stop))
        gl.store(results.maxima + entry, row_max, mask=is_row)
        gl.store(results.totals + entry, total, mask=is_row)


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
