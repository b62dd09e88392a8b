"""Sums of values with keys and values of 8 bits, and queries as columns.

The copy engine brings the bytes as they are, so that a step has half of them. They become float16 in registers, and go
to both products from there: as the left operand, which the hardware takes from registers. So the form with queries as
columns is for any number of queries. There keys and columns of values are the rows of the left operand; with queries as
rows they would be the right one, which has to be in shared memory, and converted numbers would have to be written back.

Shared memory has the numbers as pairs, each a word of 16 bits, which one instruction brings to the threads that need
them, transposed too. Two neighbours of a key, or of a value, are in one word, so a product is two: of the even columns,
and of the odd ones. For keys both add to the same logits, from queries whose columns are apart in the same way. For
values they are sums of their own. No number moves to another thread.

Numbers of 8 bits are exact in float16, and weights, which are at most 1, have more digits than in bfloat16. Queries are
multiplied by a power of 2, so that the largest of a row is between 256 and 512. What is too small for float16 then is
less than the rounding of the sum.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ejkernel_triton.flash_attention._tile import LOG2E, LOWEST, tanh
from ejkernel_triton.split_keys.columns import layout_of_columns, partial_sums, rescaled
from ejkernel_triton.split_keys.tiles import values

#: Of two words $2, the first bytes as two numbers of float16, and the second ones.
FROM_FLOAT8 = gl.constexpr("""{
.reg .b32 bytes;
.reg .b16 first, second;
prmt.b32 bytes, $2, 0, 0x3120;
mov.b32 {first, second}, bytes;
cvt.rn.f16x2.e4m3x2 $0, first;
cvt.rn.f16x2.e4m3x2 $1, second;
}""")
#: A byte behind 0x64 is a number from 1024 on. With its sign changed it is one from 1152 - 128 on.
FROM_INT8 = gl.constexpr("""{
.reg .b32 bytes, first, second, zero;
xor.b32 bytes, $2, 0x80808080;
mov.b32 zero, 0x64806480;
prmt.b32 first, bytes, 0x64646464, 0x4240;
prmt.b32 second, bytes, 0x64646464, 0x4341;
sub.rn.f16x2 $0, first, zero;
sub.rn.f16x2 $1, second, zero;
}""")


@gluon.jit
def sums_of_pairs(
    call, steps, step, part, block, stop, queries, units, weighing, OWN: gl.constexpr, SCALE: gl.constexpr,
    CAP: gl.constexpr,
):  # fmt: skip
    """What `sums_of_columns` returns. ``units`` are what the products of each row are multiplied by."""
    V_PAIRS: gl.constexpr = steps.value_words.shape[4]
    ROWS: gl.constexpr = call.ROWS
    BLOCK: gl.constexpr = call.BLOCK
    IS_FLOAT8: gl.constexpr = steps.keys.dtype.is_fp8()
    ACC: gl.constexpr = layout_of_columns(ROWS, call.WARPS)
    OF_ROWS: gl.constexpr = gl.SliceLayout(0, ACC)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    index, _, _, _ = call.rows(part, OWN, OF_ROWS)
    q_position = part.q_start + index
    unit = gl.convert_layout(units, OF_ROWS)
    full, full_end = call.seen_by_all(part)
    row_max = gl.full([ROWS], LOWEST, gl.float32, OF_ROWS)
    row_sum = partial_sums(gl.zeros([BLOCK, ROWS], gl.float32, ACC))
    even_sums = gl.zeros([V_PAIRS, ROWS], gl.float32, ACC)
    odd_sums = gl.zeros([V_PAIRS, ROWS], gl.float32, ACC)
    for j in range(block, stop):
        slot = part.origin + j * BLOCK
        even, odd = _numbers(steps.wait_for_keys(step).load(LEFT), IS_FLOAT8)
        zeros = gl.zeros([BLOCK, ROWS], gl.float32, ACC)
        product = warpgroup_mma(even, queries.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        product = warpgroup_mma(odd, queries.index(1).permute((1, 0)), product, is_async=True)
        # While the hardware multiplies, the values become float16. Then registers have all of the step.
        v = values(call, steps, step, part, slot)
        v_even, v_odd = _numbers(v.permute((1, 0)).load(LEFT), IS_FLOAT8)
        steps.release(step)
        logits = _scaled(warpgroup_mma_wait(0, [product]), unit[None, :], SCALE, CAP)
        if (slot < full) | (slot + BLOCK > full_end):
            position = slot + gl.arange(0, BLOCK, gl.SliceLayout(1, ACC))
            visible = gl.full([BLOCK, ROWS], True, gl.int1, ACC)
            visible = call.visible(visible, position[:, None], part.end, q_position[None, :])
            logits = gl.where(visible, logits, -float("inf"))
        new_max = gl.maximum(row_max, gl.max(logits, 0))
        rescale = gl.exp2(row_max - new_max)
        weights = gl.exp2(logits - new_max[None, :])
        row_sum = rescaled(row_sum, rescale) + partial_sums(weights)
        row_max = new_max
        weighing.permute((1, 0)).store(weights.to(gl.float16))
        fence_async_shared()
        right = weighing.permute((1, 0))
        even_sums = warpgroup_mma(v_even, right, even_sums * rescale[None, :], is_async=True)
        odd_sums = warpgroup_mma(v_odd, right, odd_sums * rescale[None, :], is_async=True)
        even_sums, odd_sums = warpgroup_mma_wait(0, [even_sums, odd_sums])
        step += 1
    total = gl.convert_layout(gl.sum(gl.sum(row_sum, 0), 0), OF_ROWS)
    scale = call.scale_of_values(part)
    row_max, total, sums = _joined(row_max, total, even_sums * scale, odd_sums * scale)
    return row_max, total, sums, step


@gluon.jit
def no_pairs(call, steps):
    """What `sums_of_pairs` returns for no blocks, without the step."""
    V_PAIRS: gl.constexpr = steps.value_words.shape[4]
    ACC: gl.constexpr = layout_of_columns(call.ROWS, call.WARPS)
    row_max = gl.full([call.ROWS], LOWEST, gl.float32, gl.SliceLayout(0, ACC))
    total = gl.zeros([call.ROWS], gl.float32, gl.SliceLayout(0, ACC))
    sums = gl.zeros([V_PAIRS, call.ROWS], gl.float32, ACC)
    return _joined(row_max, total, sums, sums)


@gluon.jit
def load_pairs(call, query, queries, part, OWN: gl.constexpr, DIM: gl.constexpr):
    """Copy the even columns of the queries of a tile into shared memory, and the odd ones, as float16. The unit of each
    row: what its products with keys are multiplied by.
    """
    PAIRS: gl.constexpr = queries.shape[2]
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PAIRS, PAIRS // 8], [call.WARPS, 1], [1, 0])
    _, _, place, is_row = call.rows(part, OWN, gl.SliceLayout(1, LINES))
    column = 2 * gl.arange(0, PAIRS, gl.SliceLayout(0, LINES))
    is_entry = is_row[:, None] & (column < DIM)[None, :]
    pointers = query + place[:, None] * DIM + column[None, :]
    even = gl.load(pointers, mask=is_entry, other=0.0).to(gl.float32)
    odd = gl.load(pointers + 1, mask=is_entry, other=0.0).to(gl.float32)
    # A power of 2 by its exponent, which for the smallest rows must be one that there is. NaN and infinities stay.
    largest = gl.max(gl.maximum(gl.abs(even), gl.abs(odd)), 1)
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 9)
    factor = ((262 - exponent) << 23).to(gl.float32, bitcast=True)
    queries.index(0).store((even * factor[:, None]).to(gl.float16))
    queries.index(1).store((odd * factor[:, None]).to(gl.float16))
    fence_async_shared()
    return ((exponent - 8) << 23).to(gl.float32, bitcast=True) * call.scale_of_keys(part)


@gluon.jit
def _numbers(pairs, IS_FLOAT8: gl.constexpr):
    """The first numbers of all words, and the second ones, as float16."""
    CODE: gl.constexpr = FROM_FLOAT8 if IS_FLOAT8 else FROM_INT8
    return gl.inline_asm_elementwise(CODE, "=r,=r,r", [pairs], (gl.float16, gl.float16), True, 2)


@gluon.jit
def _scaled(products, unit, SCALE: gl.constexpr, CAP: gl.constexpr):
    """The logits in units of log2."""
    if CAP > 0:
        logits = tanh(products * (unit * (SCALE / CAP)), CAP) * (CAP * LOG2E)
    else:
        logits = products * (unit * (SCALE * LOG2E))
    return logits


@gluon.jit
def _joined(row_max, total, even_sums, odd_sums):
    """With the columns of the values in their order."""
    PAIRS: gl.constexpr = even_sums.shape[0]
    ROWS: gl.constexpr = even_sums.shape[1]
    sums = gl.join(even_sums, odd_sums).permute((0, 2, 1)).reshape([2 * PAIRS, ROWS])
    COLUMNS: gl.constexpr = sums.type.layout
    row_max = gl.convert_layout(row_max, gl.SliceLayout(0, COLUMNS))
    return row_max, gl.convert_layout(total, gl.SliceLayout(0, COLUMNS)), sums
