"""Sums of values with 64 queries as rows, 16 for each of four warps. The weights stay in registers, and are multiplied
with their values at the same time as the next keys with the queries.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ejkernel_triton.flash_attention._tile import LOWEST
from ejkernel_triton.split_keys.tiles import scaled, values


@gluon.jit
def no_rows(call, steps):
    """What `sums_of_rows` returns for no blocks, without the step."""
    V_WIDTH: gl.constexpr = steps.values.shape[4]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_WIDTH, 16])
    sums = gl.zeros([call.ROWS, V_WIDTH], gl.float32, SUMS).permute((1, 0))
    COLUMNS: gl.constexpr = sums.type.layout
    row_max = gl.full([call.ROWS], LOWEST, gl.float32, gl.SliceLayout(0, COLUMNS))
    return row_max, gl.zeros([call.ROWS], gl.float32, gl.SliceLayout(0, COLUMNS)), sums


@gluon.jit
def sums_of_rows(
    call, steps, step, part, block, stop, queries, OWN: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr,
    UNIT: gl.constexpr,
):  # fmt: skip
    """Of the blocks from ``block`` up to ``stop``: the maximum, the sum of the weights, and that of the values as
    (columns, queries); and the step behind them.
    """
    V_WIDTH: gl.constexpr = steps.values.shape[4]
    ROWS: gl.constexpr = call.ROWS
    dtype: gl.constexpr = queries.dtype
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.BLOCK, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_WIDTH, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    index, _, _, _ = call.rows(part, OWN, OF_ROWS)
    q_position = part.q_start + index
    full, full_end = call.seen_by_all(part)
    row_max = gl.full([ROWS], LOWEST, gl.float32, OF_ROWS)
    row_sum = gl.zeros([ROWS], gl.float32, OF_ROWS)
    sums = gl.zeros([ROWS, V_WIDTH], gl.float32, SUMS)
    if block < stop:
        product = _start_logits(call, steps, step, queries, LOGITS)
        logits = warpgroup_mma_wait(0, [product])
        logits = _masked(call, part, logits, block, full, full_end, q_position, SCALE, CAP)
        row_max, row_sum, rescale, weights = _softmax_step(logits, row_max, row_sum, UNIT)
        weights = gl.convert_layout(weights.to(dtype), WEIGHTS)
        first_slot = part.origin + block * call.BLOCK
        if call.begin(part, first_slot) > 0:
            values(call, steps, step, part, first_slot)
        for j in range(block + 1, stop):
            product = _start_logits(call, steps, step + 1, queries, LOGITS)
            # Only the first block and the last one have slots without a value.
            weighted = warpgroup_mma(weights, steps.wait_for_values(step), sums, is_async=True)
            logits = warpgroup_mma_wait(1, [product])
            logits = _masked(call, part, logits, j, full, full_end, q_position, SCALE, CAP)
            row_max, row_sum, rescale, next_weights = _softmax_step(logits, row_max, row_sum, UNIT)
            sums = warpgroup_mma_wait(0, [weighted])
            steps.release(step)
            sums = sums * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
            weights = gl.convert_layout(next_weights.to(dtype), WEIGHTS)
            step += 1
        v = values(call, steps, step, part, part.origin + (stop - 1) * call.BLOCK)
        sums = warpgroup_mma_wait(0, [warpgroup_mma(weights, v, sums, is_async=True)])
        steps.release(step)
        step += 1
    sums = sums.permute((1, 0))
    COLUMNS: gl.constexpr = sums.type.layout
    row_max = gl.convert_layout(row_max, gl.SliceLayout(0, COLUMNS))
    return row_max, gl.convert_layout(row_sum, gl.SliceLayout(0, COLUMNS)), sums, step


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
    logits = scaled(logits, SCALE, CAP)
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
