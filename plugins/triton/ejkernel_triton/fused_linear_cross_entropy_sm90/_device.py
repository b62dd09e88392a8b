"""Logits that are never in memory: one warp fetches tiles of the hidden states and of the weight, and two groups of
four warps multiply. Each reduces its part of a tile of logits to a few numbers for each row, and stores these. For the
gradients it also stores the exponential of each logit relative to the largest one of its row in the tile, in 16 bits.

Each group has half of the rows of a tile, and both read the same words. Programs are persistent: the operands of the
next tile are fetched while this one is reduced. The groups wait for each other only where the ring of operands ends, so
that one can multiply while the other reduces.

Matrix products are asynchronous. Nothing may use the registers of a product before `warpgroup_mma_wait` returns them.
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

from ejkernel_triton.flash_attention._tile import tanh
from ejkernel_triton.gluon import tma
from ejkernel_triton.gluon.constants import LOG2E
from ejkernel_triton.gluon.shared_memory import barriers
from ejkernel_triton.grouped_matmul_sm90._pipeline import DEPTH, HALF, Stages


@aggregate
class Call:
    """What all warps know of the call."""

    #: The words of the vocabulary, those of a tile, and how many tiles there are of them, and of all logits.
    VOCAB: gl.constexpr
    COLUMNS: gl.constexpr
    COLUMN_TILES: gl.constexpr
    ROW_TILES: gl.constexpr
    TILES: gl.constexpr
    #: How many steps a product has.
    STEPS: gl.constexpr
    TRANSPOSED: gl.constexpr
    #: Tiles of rows that are neighbours in time, so that they find the same words in the L2.
    BAND: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ROWS, DIM, VOCAB, COLUMNS, TRANSPOSED, BAND):
        column_tiles, row_tiles = (VOCAB + COLUMNS - 1) // COLUMNS, (ROWS + 2 * HALF.value - 1) // (2 * HALF.value)
        self.VOCAB = gl.constexpr(VOCAB)
        self.COLUMNS = gl.constexpr(COLUMNS)
        self.COLUMN_TILES = gl.constexpr(column_tiles)
        self.ROW_TILES = gl.constexpr(row_tiles)
        self.TILES = gl.constexpr(row_tiles * column_tiles)
        self.STEPS = gl.constexpr((DIM + DEPTH.value - 1) // DEPTH.value)
        self.TRANSPOSED = gl.constexpr(TRANSPOSED)
        self.BAND = gl.constexpr(BAND)

    @gluon.jit
    def tile(self, number):
        """The first row of a tile, and its place among the tiles of words."""
        band = number // (self.BAND * self.COLUMN_TILES)
        height = gl.minimum(self.ROW_TILES - band * self.BAND, self.BAND)
        place = number - band * (self.BAND * self.COLUMN_TILES)
        return (band * self.BAND + place % height) * (2 * HALF), place // height

    @gluon.jit
    def operand(self, tile):
        """A tile of the weight, as the second operand of a product."""
        if self.TRANSPOSED:
            tile = tile.permute((1, 0))
        return tile


@aggregate
class Reduction:
    """What a tile of logits is reduced to, and where that is stored. ``columns`` of labels and ``bias`` are read, and
    the other arrays written.
    """

    columns: gl.tensor
    bias: gl.tensor
    #: By tile of words and row: the largest logit, and the sum of the exponentials of the others relative to it.
    tops: gl.tensor
    totals: gl.tensor
    #: With SMOOTHING the sum of what the largest logit is above each one, or with ENTROPY the sum of the exponentials
    #: times what each logit is above it.
    sums: gl.tensor
    #: By row: the logit of the label. It is not written where the label is not a column.
    own: gl.tensor
    #: With STORED, by row and word: the exponentials. A row has a multiple of 8 of them.
    exponentials: gl.tensor
    ROWS: gl.constexpr
    BIAS: gl.constexpr
    CAP: gl.constexpr
    SCALE: gl.constexpr
    SMOOTHING: gl.constexpr
    ENTROPY: gl.constexpr
    STORED: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, columns, bias, tops, totals, sums, own, exponentials, ROWS, BIAS, CAP, SCALE, SMOOTHING, ENTROPY, STORED
    ):
        self.columns, self.bias = columns, bias
        self.tops, self.totals, self.sums, self.own, self.exponentials = tops, totals, sums, own, exponentials
        self.ROWS = gl.constexpr(ROWS)
        self.BIAS = gl.constexpr(BIAS)
        self.CAP = gl.constexpr(CAP)
        self.SCALE = gl.constexpr(SCALE)
        self.SMOOTHING = gl.constexpr(SMOOTHING)
        self.ENTROPY = gl.constexpr(ENTROPY)
        self.STORED = gl.constexpr(STORED)


@gluon.jit
def reduce_logits(
    hidden, weight, columns, bias,
    tops, totals, sums, own, exponentials,
    ROWS: gl.constexpr, DIM: gl.constexpr, VOCAB: gl.constexpr, COLUMNS: gl.constexpr, TRANSPOSED: gl.constexpr,
    BIAS: gl.constexpr, CAP: gl.constexpr, SCALE: gl.constexpr, SMOOTHING: gl.constexpr, ENTROPY: gl.constexpr,
    STORED: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    call = Call(ROWS, DIM, VOCAB, COLUMNS, TRANSPOSED, BAND)
    reduction = Reduction(
        columns, bias, tops, totals, sums, own, exponentials, ROWS, BIAS, CAP, SCALE, SMOOTHING, ENTROPY, STORED
    )
    rows = gl.allocate_shared_memory(hidden.dtype, [2 * STAGES] + hidden.block_shape, hidden.layout)
    matrix = gl.allocate_shared_memory(weight.dtype, [STAGES] + weight.block_shape, weight.layout)
    stages = Stages(rows, matrix, barriers(STAGES, 1), barriers(STAGES, 2), STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_warp_group_0, (call, stages, reduction)),
            (_warp_group_1, (call, stages, reduction)),
            (_fetch, (call, stages, hidden, weight)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _fetch(call, stages, hidden, weight):
    """The work of the warp that fetches: all tiles, in the order in which the other warps read them."""
    step, number = 0, gl.program_id(0)
    while number < call.TILES:
        row, place = call.tile(number)
        column = place * call.COLUMNS
        for s in range(call.STEPS):
            stages.wait_until_empty(step)
            full = stages.full.index(step % stages.COUNT)
            mbarrier.expect(full, 2 * hidden.block_type.nbytes + weight.block_type.nbytes)
            for half in gl.static_range(2):
                tma.load(hidden, [row + half * HALF, s * DEPTH], full, stages.rows_of(step, half))
            if call.TRANSPOSED:
                tma.load(weight, [column, s * DEPTH], full, stages.matrix_of(step))
            else:
                tma.load(weight, [s * DEPTH, column], full, stages.matrix_of(step))
            step += 1
        # All programs are at about the same place, so that they share what is in the L2.
        number += gl.num_programs(0)


@gluon.jit
def _warp_group_0(call, stages, reduction):
    _multiply(0, call, stages, reduction)


@gluon.jit
def _warp_group_1(call, stages, reduction):
    _multiply(1, call, stages, reduction)


@gluon.jit
def _multiply(WARP_GROUP: gl.constexpr, call, stages, reduction):
    """The work of a group of four warps: half of the rows of each tile."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.COLUMNS, 16])
    step, number = 0, gl.program_id(0)
    while number < call.TILES:
        row, place = call.tile(number)
        logits = gl.zeros([HALF, call.COLUMNS], gl.float32, SUMS)
        for s in range(call.STEPS):
            stages.wait_until_full(step)
            tile = call.operand(stages.matrix_of(step))
            logits = warpgroup_mma(stages.rows_of(step, WARP_GROUP), tile, logits, is_async=True)
            logits = warpgroup_mma_wait(1, [logits])
            # The product of the step before has ended.
            if s > 0:
                stages.release(step - 1)
            step += 1
        logits = warpgroup_mma_wait(0, [logits])
        stages.release(step - 1)
        _reduce(call, reduction, logits, row + WARP_GROUP * HALF, place)
        number += gl.num_programs(0)


@gluon.jit
def _reduce(call, reduction, products, row, place):
    """Store what the losses need of half of the rows of a tile. Half of its words come after the other, so that less is
    in registers at a time.
    """
    HALVES: gl.constexpr = [HALF, 2, call.COLUMNS // 2]
    left, right = gl.split(products.reshape(HALVES).permute((0, 2, 1)))
    column, middle = place * call.COLUMNS, place * call.COLUMNS + call.COLUMNS // 2
    own_row = row + gl.arange(0, HALF, gl.SliceLayout(1, left.type.layout))
    is_row = own_row < reduction.ROWS
    label = gl.load(reduction.columns + own_row, mask=is_row, other=-1)
    left = _logits(call, reduction, left, column)
    of_label, top = _of_label(left, column, label), gl.max(left, 1)
    right = _logits(call, reduction, right, middle)
    of_label, top = of_label + _of_label(right, middle, label), gl.maximum(top, gl.max(right, 1))
    gl.store(reduction.own + own_row, of_label, mask=(label >= column) & (label < column + call.COLUMNS))
    places = place.to(gl.int64) * reduction.ROWS + own_row
    gl.store(reduction.tops + places, top, mask=is_row)
    base = gl.where(gl.abs(top) < float("inf"), top, 0.0)
    left_total, left_sum = _sums(call, reduction, left, own_row, column, base)
    right_total, right_sum = _sums(call, reduction, right, own_row, middle, base)
    gl.store(reduction.totals + places, left_total + right_total, mask=is_row)
    if reduction.SMOOTHING or reduction.ENTROPY:
        gl.store(reduction.sums + places, left_sum + right_sum, mask=is_row)


@gluon.jit
def _words(logits, column):
    return column + gl.arange(0, logits.shape[1], gl.SliceLayout(0, logits.type.layout))


@gluon.jit
def _logits(call, reduction, products, column):
    """The logits of neighbouring words from the first one, ``column``; -inf behind the vocabulary."""
    word = _words(products, column)
    if reduction.BIAS:
        products += gl.load(reduction.bias + word, mask=word < call.VOCAB, other=0).to(gl.float32)[None, :]
    if reduction.CAP > 0:
        products = reduction.CAP * tanh(products * (1.0 / reduction.CAP), reduction.CAP)
    products *= reduction.SCALE
    if column + products.shape[1] > call.VOCAB:
        products = gl.where((word < call.VOCAB)[None, :], products, -float("inf"))
    return products


@gluon.jit
def _of_label(logits, column, label):
    """The logit of the label of each row; 0 if it is not among these."""
    return gl.sum(gl.where(_words(logits, column)[None, :] == label[:, None], logits, 0.0), 1)


@gluon.jit
def _sums(call, reduction, logits, row, column, base):
    """The sum of the exponentials relative to ``base``, and the sum that the call needs beside it."""
    # Differences first: the product of a large logit has too few digits.
    below = logits - base[:, None]
    parts = gl.exp2(below * LOG2E)
    if reduction.STORED:
        word = _words(logits, column)
        # Rows of a multiple of 16 bytes, so that neighbours are stored at once: those behind the vocabulary are 0.
        PITCH: gl.constexpr = (call.VOCAB + 7) // 8 * 8
        places = row.to(gl.int64)[:, None] * PITCH + word[None, :]
        mask = (row < reduction.ROWS)[:, None] & (word < PITCH)[None, :]
        gl.store(reduction.exponentials + places, parts.to(reduction.exponentials.dtype.element_ty), mask=mask)
    if reduction.ENTROPY:
        # 0 times -inf is 0: a word that cannot be adds nothing.
        return gl.reduce((parts, gl.where(parts > 0, parts * below, 0.0)), 1, _add_pairs)
    if reduction.SMOOTHING:
        if column + logits.shape[1] > call.VOCAB:
            below = gl.where((_words(logits, column) < call.VOCAB)[None, :], below, 0.0)
        return gl.reduce((parts, -below), 1, _add_pairs)
    total = gl.sum(parts, 1)
    return total, total


@gluon.jit
def _add_pairs(first, second, other_first, other_second):
    return first + other_first, second + other_second
