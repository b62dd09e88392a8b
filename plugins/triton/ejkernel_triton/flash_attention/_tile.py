"""Device code that the forward and the backward share: tiles in memory, logits, visible blocks, dropout.

A tile is one block of queries against one block of keys of one head. Logits are in units of log2, because the
hardware's exponential has base 2. A feature that a call does not use is a constant that removes its code, so that it
costs nothing.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
# The initial maximum of a row: below every finite logit, and not -inf, whose difference with itself is NaN.
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def load_rows(base, first, length, STRIDE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
              CHECK_BOUNDS: tl.constexpr):  # fmt: skip
    """``ROWS`` rows from ``first``: ``DIM`` columns, padded with 0 to ``WIDTH``, a power of two."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    pointers = base + first.to(tl.int64) * STRIDE + row[:, None] * STRIDE + column[None, :]
    if CHECK_BOUNDS and DIM < WIDTH:
        return tl.load(pointers, mask=(first + row < length)[:, None] & (column < DIM)[None, :], other=0.0)
    if CHECK_BOUNDS:
        return tl.load(pointers, mask=(first + row < length)[:, None], other=0.0)
    if DIM < WIDTH:
        return tl.load(pointers, mask=(column < DIM)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def load_keys(base, first, length, slots, STRIDE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
              WIDTH: tl.constexpr, CHECK_BOUNDS: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """`load_rows` of keys or values. With ``SLOTS``, and unless the block is full, it loads only the slots that hold a
    key: what is in the others may be NaN, which no weight of 0 would remove.
    """
    if SLOTS and CHECK_BOUNDS:
        row = tl.arange(0, ROWS)
        column = tl.arange(0, WIDTH)
        is_key = tl.load(slots + first + row, mask=first + row < length, other=-1) >= 0
        pointers = base + first.to(tl.int64) * STRIDE + row[:, None] * STRIDE + column[None, :]
        return tl.load(pointers, mask=is_key[:, None] & (column < DIM)[None, :], other=0.0)
    return load_rows(base, first, length, STRIDE, ROWS, DIM, WIDTH, CHECK_BOUNDS)


@triton.jit
def key_places(keys, length, slots, SLOTS: tl.constexpr):
    """The position of each key, and whether there is a key: without ``SLOTS`` a key's position is its index."""
    if SLOTS:
        places = tl.load(slots + keys, mask=keys < length, other=-1)
        return places, places >= 0
    return keys, keys < length


@triton.jit
def key_end(lengths, batch, k_length, LENGTHS: tl.constexpr):
    """The number of keys in this entry of the batch."""
    if LENGTHS:
        return tl.minimum(tl.load(lengths + batch), k_length)
    return k_length


@triton.jit
def query_offset(q_start, batch, q_length, k_length, START: tl.constexpr):
    """The position of the first query. By default the last query is at the position of the last key."""
    if START:
        return tl.load(q_start + batch)
    return k_length - q_length


@triton.jit
def store_rows(base, first, length, x, STRIDE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
               WIDTH: tl.constexpr):  # fmt: skip
    """Store the rows and columns that `load_rows` would load, without the padding."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    pointers = base + first.to(tl.int64) * STRIDE + row[:, None] * STRIDE + column[None, :]
    tl.store(pointers, x.to(base.dtype.element_ty), mask=(first + row < length)[:, None] & (column < DIM)[None, :])


@triton.jit
def blocks_of_interval(low, high, full_low, full_high, BLOCK: tl.constexpr):
    """The blocks with tokens from ``low`` to ``high``, and the full blocks: all their tokens are from ``full_low`` to
    ``full_high``.
    """
    low = tl.maximum(low, 0)
    first = low // BLOCK
    end = tl.maximum(tl.cdiv(tl.maximum(high, low), BLOCK), first)
    full = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(full_low, 0), BLOCK), first), end)
    full_end = tl.minimum(tl.maximum(tl.maximum(full_high, 0) // BLOCK, full), end)
    return first, full, full_end, end


@triton.jit
def band_blocks(first, last, offset, length, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """The blocks of the other side's ``length`` tokens that the tokens ``first`` to ``last`` of one side see.

    The position of a token on the other side is its index plus ``offset``. It sees ``LEFT`` tokens to the left of that
    position and ``RIGHT`` to the right, and all where these are negative.
    """
    low, full_low = 0, 0
    if LEFT >= 0:
        low, full_low = first + offset - LEFT, last + offset - LEFT
    high, full_high = length, length
    if RIGHT >= 0:
        high = tl.minimum(length, last + offset + RIGHT + 1)
        full_high = tl.minimum(length, first + offset + RIGHT + 1)
    return blocks_of_interval(low, high, full_low, full_high, BLOCK)


@triton.jit
def interval_blocks(start, end, is_token, length, BLOCK: tl.constexpr):
    """The same from the interval of the other side that each token sees."""
    has_interval = is_token & (start < end)
    low = tl.min(tl.where(has_interval, start, length), 0)
    high = tl.max(tl.where(has_interval, end, 0), 0)
    full_low = tl.max(tl.where(is_token, start, 0), 0)
    full_high = tl.min(tl.where(is_token, end, length), 0)
    return blocks_of_interval(low, high, full_low, full_high, BLOCK)


@triton.jit
def segment_blocks(ids, is_token, extremes, count, BLOCKS: tl.constexpr):
    """The blocks of the other side that may have ids of these tokens, and the full blocks: all tokens of both sides are
    in one segment.

    ``extremes`` has three rows of ``count`` numbers: the lowest and the highest id of each block without padding, and
    the lowest with padding.
    """
    none = 2147483647
    low = tl.min(tl.where(is_token & (ids > 0), ids, none), 0)
    high = tl.max(tl.where(is_token, ids, 0), 0)
    is_one_segment = (tl.min(tl.where(is_token, ids, none), 0) == high) & (high > 0)
    index = tl.arange(0, BLOCKS)
    is_block = index < count
    other_low = tl.load(extremes + index, mask=is_block, other=none)
    other_high = tl.load(extremes + count + index, mask=is_block, other=0)
    other_lowest = tl.load(extremes + 2 * count + index, mask=is_block, other=0)
    may_match = is_block & (low <= other_high) & (other_low <= high)
    is_full = is_block & is_one_segment & (other_lowest == high) & (other_high == high)
    first = tl.min(tl.where(may_match, index, count), 0)
    end = tl.max(tl.where(may_match, index + 1, 0), 0)
    full_first = tl.min(tl.where(is_full, index, count), 0)
    full_end = tl.min(tl.where((index > full_first) & (is_full == 0), index, count), 0)
    return first, full_first, full_end, tl.maximum(end, first)


@triton.jit
def slot_blocks(first_place, last_place, extremes, count, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                BLOCKS: tl.constexpr):  # fmt: skip
    """The blocks of slots that queries at ``first_place`` to ``last_place`` may see, and the longest run of full blocks
    from the first full one on.

    ``extremes`` has three rows of ``count`` numbers: the lowest and the highest position in each block, without empty
    slots, and whether all slots hold a key.
    """
    index = tl.arange(0, BLOCKS)
    is_block = index < count
    low = tl.load(extremes + index, mask=is_block, other=2147483647)
    high = tl.load(extremes + count + index, mask=is_block, other=-1)
    is_full = tl.load(extremes + 2 * count + index, mask=is_block, other=0) > 0
    is_seen = is_place_range_seen(low, high, first_place, last_place, LEFT, RIGHT)
    if LEFT >= 0:
        is_full = is_full & (low >= last_place - LEFT)
    if RIGHT >= 0:
        is_full = is_full & (high <= first_place + RIGHT)
    first = tl.min(tl.where(is_seen, index, count), 0)
    end = tl.max(tl.where(is_seen, index + 1, 0), 0)
    full = tl.min(tl.where(is_full, index, count), 0)
    full_end = tl.min(tl.where((index > full) & (is_full == 0), index, count), 0)
    end = tl.maximum(end, first)
    full = tl.minimum(tl.maximum(full, first), end)
    return first, full, tl.minimum(tl.maximum(full_end, full), end), end


@triton.jit
def is_place_range_seen(low, high, first_place, last_place, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Whether queries at ``first_place`` to ``last_place`` may see keys at ``low`` to ``high``, of which there are none
    if ``low`` is above ``high``.
    """
    is_seen = low <= high
    if LEFT >= 0:
        is_seen = is_seen & (high >= first_place - LEFT)
    if RIGHT >= 0:
        is_seen = is_seen & (low <= last_place + RIGHT)
    return is_seen


@triton.jit
def is_slot_block_seen(j, first_query, q_length, offset, extremes, count, LEFT: tl.constexpr, RIGHT: tl.constexpr,
                       Q_BLOCK: tl.constexpr):  # fmt: skip
    """Whether a block of queries may see block ``j`` of slots: keys of a ring that it sees may be in two runs."""
    last_query = tl.minimum(first_query + Q_BLOCK, q_length) - 1
    low, high = tl.load(extremes + j), tl.load(extremes + count + j)
    return is_place_range_seen(low, high, first_query + offset, last_query + offset, LEFT, RIGHT)


@triton.jit
def visible_queries(places, is_key, offset, length, LEFT: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """For keys at any positions: the interval of queries that see each, and the blocks of these queries."""
    start, end = tl.zeros_like(places), tl.zeros_like(places) + length
    if RIGHT >= 0:
        start = tl.maximum(places - offset - RIGHT, 0)
    if LEFT >= 0:
        end = tl.minimum(places - offset + LEFT + 1, length)
    first, full, full_end, stop = interval_blocks(start, end, is_key, length, BLOCK)
    is_seen = tl.max((is_key & (start < end)).to(tl.int32), 0) > 0
    return start, end, first, full, full_end, tl.where(is_seen, stop, first)


@triton.jit
def intersection(first, full, full_end, end, other_first, other_full, other_full_end, other_end):
    """The blocks that are in both ranges, and those that are full in both."""
    first = tl.maximum(first, other_first)
    end = tl.maximum(tl.minimum(end, other_end), first)
    full = tl.minimum(tl.maximum(tl.maximum(full, other_full), first), end)
    full_end = tl.minimum(tl.maximum(tl.minimum(full_end, other_full_end), full), end)
    return first, full, full_end, end


@triton.jit
def visible_blocks(
    first_token, tokens, is_token, starts, ends, ids, extremes, length, other_length, other_blocks, batch,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PACKED: tl.constexpr, SEGMENTS: tl.constexpr, MASK: tl.constexpr,
    START: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, OTHER_BLOCK: tl.constexpr,
):  # fmt: skip
    """What a block of tokens sees of the other side: the interval and the segment of each token, and a range of blocks.

    Blocks from ``full`` to ``full_end`` are full. The others of the range, ``first`` to ``full`` and ``full_end`` to
    ``stop``, are partial. With ``START`` tokens are queries, and ``starts`` has the position of the first one. With
    ``SLOTS`` the positions of keys are in ``extremes``, behind the rows for segments.
    """
    start, end = tokens, tokens
    if PACKED:
        start = tl.load(starts + tokens, mask=is_token, other=0)
        end = tl.load(ends + tokens, mask=is_token, other=0)
        first, full, full_end, stop = interval_blocks(start, end, is_token, other_length, OTHER_BLOCK)
    else:
        offset = query_offset(starts, batch, length, other_length, START)
        last_token = tl.minimum(first_token + BLOCK, length) - 1
        first, full, full_end, stop = band_blocks(
            first_token, last_token, offset, other_length, LEFT, RIGHT, OTHER_BLOCK
        )
        if SLOTS:
            slot_extremes = extremes + (3 * other_blocks if SEGMENTS else 0)
            first, full, full_end, stop = slot_blocks(
                first_token + offset, last_token + offset, slot_extremes, other_blocks, LEFT, RIGHT, SLOTS
            )
        elif START:
            # Queries may stand behind the last key, where a window sees nothing.
            stop = tl.where(first * OTHER_BLOCK < other_length, stop, first)
        start, end = tokens + (offset - LEFT), tokens + (offset + RIGHT + 1)
    segment, first, full, full_end, stop = visible_segments(
        first, full, full_end, stop, tokens, is_token, ids, extremes, other_blocks, SEGMENTS, MASK
    )
    return start, end, segment, first, full, full_end, stop


@triton.jit
def visible_segments(first, full, full_end, stop, tokens, is_token, ids, extremes, other_blocks,
                     SEGMENTS: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """The segment of each token, and of a range of blocks of the other side what segments and a mask leave of it."""
    segment = tokens
    if SEGMENTS:
        segment = tl.load(ids + tokens, mask=is_token, other=0)
        s_first, s_full, s_full_end, s_stop = segment_blocks(segment, is_token, extremes, other_blocks, SEGMENTS)
        first, full, full_end, stop = intersection(first, full, full_end, stop, s_first, s_full, s_full_end, s_stop)
    if MASK:
        full_end = full
    return segment, first, full, full_end, stop


@triton.jit
def partial_block(t, full, full_end):
    """The t-th partial block of a range."""
    return tl.where(t < full, t, t + (full_end - full))


@triton.jit
def initial_softmax(sinks, head, SINKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The maximum and the sum of the online softmax before the first block of keys: those of the sinks, if any.

    Sinks are logits without a value.
    """
    row_max = tl.full([BLOCK], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK], tl.float32)
    if SINKS:
        index = tl.arange(0, WIDTH)
        sink = tl.load(sinks + head * SINKS + index, mask=index < SINKS, other=-float("inf")).to(tl.float32)
        largest = tl.maximum(tl.max(sink, 0), LOWEST / 2)
        row_max = tl.zeros([BLOCK], tl.float32) + largest * LOG2E
        # Subtract before scaling: the difference of two rounded products would have a large relative error.
        row_sum += tl.sum(tl.exp2((sink - largest) * LOG2E), 0)
    return row_max, row_sum


@triton.jit
def tanh(x, CAP: tl.constexpr):
    """By one exponential, and exact at both ends: 2 ** inf is inf, and 2 / inf is 0.

    Near 0 its absolute error is that of a number near 1, which a large cap would multiply. A series is more accurate
    there.
    """
    capped = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
    if CAP > 100:
        square = x * x
        capped = tl.where(square < 0.01, x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0))), capped)
    return capped


@triton.jit
def bias_in_log2(bias):
    """A bias in units of log2. The lowest finite numbers, by which many calls mask keys, stay finite: a row that has
    nothing else still attends to such keys.
    """
    bias = bias.to(tl.float32)
    return tl.where(bias == -float("inf"), bias, tl.maximum(bias * LOG2E, LOWEST / 2))


@triton.jit
def load_bias_or_mask(base, queries, keys, is_query, k_length, q_stride, UNIT: tl.constexpr):
    """A tile of a bias or mask whose rows are a multiple of ``UNIT`` long. ``UNIT`` is 0 if a row has one element, for
    all keys.

    A thread loads several elements at once if the compiler can prove that they are contiguous and inside the array.
    """
    pointers = base + queries.to(tl.int64)[:, None] * q_stride
    if UNIT > 0:
        is_stored = keys < tl.cdiv(k_length, UNIT) * UNIT
        return tl.load(pointers + keys[None, :], mask=is_query[:, None] & is_stored[None, :], other=0)
    return tl.broadcast_to(tl.load(pointers, mask=is_query[:, None], other=0), [queries.shape[0], keys.shape[0]])


@triton.jit
def times_unit(number, UNIT: tl.constexpr):
    """A stride, from its quotient by ``UNIT``: so the compiler knows that the stride is a multiple."""
    if UNIT > 0:
        number *= UNIT
    return number


@triton.jit
def mix(x):
    """The hash of the operation's dropout: see `ejkernel_ops.flash_attention.dropout`."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def dropout_state(seed, row, queries):
    """The state of the random numbers of each query of one head."""
    state = mix(mix(tl.load(seed) + 0x9E3779B9) ^ row.to(tl.uint32))
    return mix(state ^ queries.to(tl.uint32))


@triton.jit
def keep_mask(state, keys, THRESHOLD: tl.constexpr):
    """The weights that dropout keeps: ``state`` and ``keys`` broadcast to a tile."""
    return mix(state + keys.to(tl.uint32) * 0x9E3779B9) >= THRESHOLD
