"""Sums of values with queries as columns: both products are transposed.

Of four warps, each has 16 keys of 64, and then 16 columns of the values; eight are two such groups, each for half of
the queries.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ejkernel_triton.flash_attention._tile import LOWEST
from ejkernel_triton.split_keys.tiles import scaled, values


@gluon.constexpr_function
def layout_of_columns(rows, warps):
    """Of both products: they have the same columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, rows * 4 // warps, 16])


@gluon.jit
def no_columns(call, steps):
    """What `sums_of_columns` returns for no blocks, without the step."""
    V_WIDTH: gl.constexpr = steps.values.shape[4]
    ACC: gl.constexpr = layout_of_columns(call.ROWS, call.WARPS)
    row_max = gl.full([call.ROWS], LOWEST, gl.float32, gl.SliceLayout(0, ACC))
    total = gl.zeros([call.ROWS], gl.float32, gl.SliceLayout(0, ACC))
    return row_max, total, gl.zeros([V_WIDTH, call.ROWS], gl.float32, ACC)


@gluon.jit
def sums_of_columns(
    call, steps, step, part, block, stop, queries, weighing, OWN: gl.constexpr, SCALE: gl.constexpr, CAP: gl.constexpr,
    UNIT: gl.constexpr,
):  # fmt: skip
    """Of the blocks from ``block`` up to ``stop``: the maximum, the sum of the weights, and that of the values as
    (columns, queries); and the step behind them. ``weighing`` is for the weights of a step, which the hardware reads
    from shared memory.
    """
    V_WIDTH: gl.constexpr = steps.values.shape[4]
    ROWS: gl.constexpr = call.ROWS
    BLOCK: gl.constexpr = call.BLOCK
    ACC: gl.constexpr = layout_of_columns(ROWS, call.WARPS)
    OF_ROWS: gl.constexpr = gl.SliceLayout(0, ACC)
    index, _, _, _ = call.rows(part, OWN, OF_ROWS)
    q_position = part.q_start + index
    full, full_end = call.seen_by_all(part)
    row_max = gl.full([ROWS], LOWEST, gl.float32, OF_ROWS)
    row_sum = partial_sums(gl.zeros([BLOCK, ROWS], gl.float32, ACC))
    sums = gl.zeros([V_WIDTH, ROWS], gl.float32, ACC)
    for j in range(block, stop):
        slot = part.origin + j * BLOCK
        k = steps.wait_for_keys(step)
        zeros = gl.zeros([BLOCK, ROWS], gl.float32, ACC)
        product = warpgroup_mma(k, queries.permute((1, 0)), zeros, use_acc=False, is_async=True)
        logits = scaled(warpgroup_mma_wait(0, [product]), SCALE, CAP)
        if (slot < full) | (slot + BLOCK > full_end):
            position = slot + gl.arange(0, BLOCK, gl.SliceLayout(1, ACC))
            visible = gl.full([BLOCK, ROWS], True, gl.int1, ACC)
            visible = call.visible(visible, position[:, None], part.end, q_position[None, :])
            logits = gl.where(visible, logits, -float("inf"))
        new_max = gl.maximum(row_max, gl.max(logits, 0) * UNIT)
        rescale = gl.exp2(row_max - new_max)
        weights = gl.exp2(logits * UNIT - new_max[None, :])
        row_sum = rescaled(row_sum, rescale) + partial_sums(weights)
        row_max = new_max
        weighing.permute((1, 0)).store(weights.to(weighing.dtype))
        v = values(call, steps, step, part, slot)
        fence_async_shared()
        product = warpgroup_mma(v.permute((1, 0)), weighing.permute((1, 0)), sums * rescale[None, :], is_async=True)
        sums = warpgroup_mma_wait(0, [product])
        steps.release(step)
        step += 1
    return row_max, gl.convert_layout(gl.sum(gl.sum(row_sum, 0), 0), OF_ROWS), sums, step


@gluon.jit
def partial_sums(weights):
    """(4, 8, rows): for each row the sums of the weights of each thread. They are added up at the end."""
    BLOCK: gl.constexpr = weights.shape[0]
    ROWS: gl.constexpr = weights.shape[1]
    return gl.sum(gl.sum(weights.reshape([BLOCK // 64, 4, 2, 8, ROWS]), 2), 0)


@gluon.jit
def rescaled(row_sum, rescale):
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, row_sum.type.layout))
    return row_sum * gl.convert_layout(rescale, layout)[None, None, :]
