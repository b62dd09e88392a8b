"""Attention of few queries on Hopper: one warp fetches keys and values, and others compute.

A program takes one part of the keys of a row of the batch and a key head after another. The warp that fetches is ahead
by all stages of the ring, across parts too: keys of the next part are on their way while this one ends. If the queries
of a key head are several tiles, two groups of warps read each block that is fetched, each for a tile.

The hardware multiplies 64 rows at a time, by 8 columns or more. Of tiles with 64 queries these are the rows. With fewer
both products are transposed: keys by queries, and columns of values by queries. Keys and columns of values are that
many; queries need only be padded to 16. With keys and values of 8 bits all tiles are transposed: see `pairs`.

With parts of a fixed size, a program has some of them one after another, or all. The sums of each begin anew, and are
added in the order of the parts: here, or by a second launch with the same operations. So the bits of a result do not
depend on how many programs have parts of it.
"""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ejkernel_triton.flash_attention._tile import LOG2E
from ejkernel_triton.split_keys.columns import no_columns, sums_of_columns
from ejkernel_triton.split_keys.pairs import load_pairs, no_pairs, sums_of_pairs
from ejkernel_triton.split_keys.results import added, store_results, store_sums
from ejkernel_triton.split_keys.rows import no_rows, sums_of_rows
from ejkernel_triton.split_keys.tiles import load_queries


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
    EIGHT_BITS: gl.constexpr = steps.keys.dtype.primitive_bitwidth == 8
    WIDTH: gl.constexpr = steps.key_words.shape[4]
    OF_TILES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    if EIGHT_BITS:
        layout: gl.constexpr = gl.NVMMASharedLayout(128 if WIDTH >= 64 else 64, 16, 2)
        queries = gl.allocate_shared_memory(gl.float16, [2, call.ROWS, WIDTH], layout)
        weighing = gl.allocate_shared_memory(gl.float16, [call.ROWS, call.BLOCK], OF_TILES)
    else:
        queries = gl.allocate_shared_memory(steps.keys.dtype, [call.ROWS, WIDTH], OF_TILES)
        weighing = queries
        if call.ROWS < 64:
            weighing = gl.allocate_shared_memory(steps.keys.dtype, [call.ROWS, call.BLOCK], OF_TILES)
    # Of parts of a fixed size.
    BLOCKS: gl.constexpr = call.PART_SIZE // call.BLOCK
    step = 0
    for number in range(gl.program_id(0), call.PARTS, gl.num_programs(0)):
        part = call.part(number)
        if EIGHT_BITS:
            units = load_pairs(call, query, queries, part, OWN, DIM)
        else:
            load_queries(call, query, queries, part, OWN, DIM)
            units = None
        if call.PART_SIZE == 0:
            row_max, total, sums, step = _sums(
                call, steps, step, part, part.block, part.stop, queries, units, weighing, OWN, SCALE, CAP, UNIT
            )
            if call.SPLITS == 1:
                store_results(call, results, part, OWN, row_max, total, sums)
            else:
                store_sums(call, results, part, OWN, part.split, row_max, total, sums, part.block < part.stop)
        else:
            row_max, total, sums = _no_sums(call, steps)
            first = part.origin // call.BLOCK
            for own in range((first + part.block) // BLOCKS, gl.cdiv(first + part.stop, BLOCKS)):
                block, stop = own * BLOCKS - first, (own + 1) * BLOCKS - first
                block, stop = gl.maximum(part.block, block), gl.minimum(part.stop, stop)
                own_max, own_total, own_sums, step = _sums(
                    call, steps, step, part, block, stop, queries, units, weighing, OWN, SCALE, CAP, UNIT
                )
                if call.SPLITS == 1:
                    row_max, total, sums = added(row_max, total, sums, own_max, own_total, own_sums)
                else:
                    store_sums(call, results, part, OWN, own, own_max, own_total, own_sums, True)
            if call.SPLITS == 1:
                store_results(call, results, part, OWN, row_max, total, sums)


@gluon.jit
def _sums(
    call, steps, step, part, block, stop, queries, units, weighing, OWN: gl.constexpr, SCALE: gl.constexpr,
    CAP: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """Of some blocks of a part: the maximum, the sum of the weights, and that of the values; the step behind them."""
    if steps.keys.dtype.primitive_bitwidth == 8:
        result = sums_of_pairs(call, steps, step, part, block, stop, queries, units, weighing, OWN, SCALE, CAP)
    elif call.ROWS == 64:
        result = sums_of_rows(call, steps, step, part, block, stop, queries, OWN, SCALE, CAP, UNIT)
    else:
        result = sums_of_columns(call, steps, step, part, block, stop, queries, weighing, OWN, SCALE, CAP, UNIT)
    return result


@gluon.jit
def _no_sums(call, steps):
    """The maximum and both sums of no blocks."""
    if steps.keys.dtype.primitive_bitwidth == 8:
        result = no_pairs(call, steps)
    elif call.ROWS == 64:
        result = no_rows(call, steps)
    else:
        result = no_columns(call, steps)
    return result
