"""Device code that the forward and the backward share: tiles in memory, logits, who sees whom, dropout.

A tile is one block of queries against one block of keys of one head. Logits are kept in units of log2, because the
hardware's exponential is that of 2. Everything a call does not have is a constant that removes its code: what is not
used costs nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
# Where the greatest logit of a row starts: below every finite one, and not -inf, whose difference with itself is NaN.
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def load_rows(base, first, length, STRIDE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
              CHECKED: tl.constexpr):  # fmt: skip
    """``ROWS`` rows from ``first``, as wide as ``WIDTH``: a power of two, of which ``DIM`` are there; 0 elsewhere."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    place = base + first.to(tl.int64) * STRIDE + row[:, None] * STRIDE + column[None, :]
    if CHECKED and DIM < WIDTH:
        return tl.load(place, mask=(first + row < length)[:, None] & (column < DIM)[None, :], other=0.0)
    if CHECKED:
        return tl.load(place, mask=(first + row < length)[:, None], other=0.0)
    if DIM < WIDTH:
        return tl.load(place, mask=(column < DIM)[None, :], other=0.0)
    return tl.load(place)


@triton.jit
def store_rows(base, first, length, x, STRIDE: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
               WIDTH: tl.constexpr):  # fmt: skip
    """Store what `load_rows` would load, and nothing beside it."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    place = base + first.to(tl.int64) * STRIDE + row[:, None] * STRIDE + column[None, :]
    tl.store(place, x.to(base.dtype.element_ty), mask=(first + row < length)[:, None] & (column < DIM)[None, :])


@triton.jit
def blocks_in_sight(low, high, whole_low, whole_high, BLOCK: tl.constexpr):
    """The blocks that tokens ``low`` to ``high`` touch, and inside them those that the whole range contains."""
    low = tl.maximum(low, 0)
    first = low // BLOCK
    end = tl.maximum(tl.cdiv(tl.maximum(high, low), BLOCK), first)
    whole = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(whole_low, 0), BLOCK), first), end)
    whole_end = tl.minimum(tl.maximum(tl.maximum(whole_high, 0) // BLOCK, whole), end)
    return first, whole, whole_end, end


@triton.jit
def band_blocks(first, last, shift, length, BEFORE: tl.constexpr, AFTER: tl.constexpr, BLOCK: tl.constexpr):
    """What the tokens ``first`` to ``last`` of one side see of the other side's ``length`` tokens, in blocks of it.

    A token's own place on the other side is its index plus ``shift``; it sees ``BEFORE`` tokens before that place and
    ``AFTER`` behind it, all where these are negative.
    """
    low, whole_low = 0, 0
    if BEFORE >= 0:
        low, whole_low = first + shift - BEFORE, last + shift - BEFORE
    high, whole_high = length, length
    if AFTER >= 0:
        high = tl.minimum(length, last + shift + AFTER + 1)
        whole_high = tl.minimum(length, first + shift + AFTER + 1)
    return blocks_in_sight(low, high, whole_low, whole_high, BLOCK)


@triton.jit
def interval_blocks(start, end, real, length, BLOCK: tl.constexpr):
    """The same from each token's own interval of the other side; what is not ``real`` does not count."""
    seeing = real & (start < end)
    low = tl.min(tl.where(seeing, start, length), 0)
    high = tl.max(tl.where(seeing, end, 0), 0)
    whole_low = tl.max(tl.where(real, start, 0), 0)
    whole_high = tl.min(tl.where(real, end, length), 0)
    return blocks_in_sight(low, high, whole_low, whole_high, BLOCK)


@triton.jit
def segment_blocks(ids, real, extremes, count, BLOCKS: tl.constexpr):
    """The blocks of the other side in which these tokens may meet their ids, and those in which all are one segment.

    ``extremes`` has three rows of ``count`` numbers: the lowest and the highest id of each block, padding aside, and
    the lowest with padding.
    """
    none = 2147483647
    low = tl.min(tl.where(real & (ids > 0), ids, none), 0)
    high = tl.max(tl.where(real, ids, 0), 0)
    one = (tl.min(tl.where(real, ids, none), 0) == high) & (high > 0)
    index = tl.arange(0, BLOCKS)
    there = index < count
    other_low = tl.load(extremes + index, mask=there, other=none)
    other_high = tl.load(extremes + count + index, mask=there, other=0)
    other_least = tl.load(extremes + 2 * count + index, mask=there, other=0)
    meets = there & (low <= other_high) & (other_low <= high)
    whole = there & one & (other_least == high) & (other_high == high)
    first = tl.min(tl.where(meets, index, count), 0)
    end = tl.max(tl.where(meets, index + 1, 0), 0)
    whole_first = tl.min(tl.where(whole, index, count), 0)
    whole_end = tl.min(tl.where((index > whole_first) & (whole == 0), index, count), 0)
    return first, whole_first, whole_end, tl.maximum(end, first)


@triton.jit
def both(first, whole, whole_end, end, first_2, whole_2, whole_end_2, end_2):
    """Two such ranges at once."""
    first = tl.maximum(first, first_2)
    end = tl.maximum(tl.minimum(end, end_2), first)
    whole = tl.minimum(tl.maximum(tl.maximum(whole, whole_2), first), end)
    whole_end = tl.minimum(tl.maximum(tl.minimum(whole_end, whole_end_2), whole), end)
    return first, whole, whole_end, end


@triton.jit
def in_sight(
    first_token, tokens, real, starts, ends, ids, extremes, length, other_length, other_blocks,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, PACKED: tl.constexpr, SEGMENTS: tl.constexpr, MASK: tl.constexpr,
    BLOCK: tl.constexpr, OTHER_BLOCK: tl.constexpr,
):  # fmt: skip
    """What a block of tokens of one side sees of the other: each token's interval there, and its segment; then blocks.

    ``first`` to ``whole`` and ``whole_end`` to ``last`` are at the edges; ``whole`` to ``whole_end`` need no look at
    any mask.
    """
    start, end = tokens, tokens
    if PACKED:
        start = tl.load(starts + tokens, mask=real, other=0)
        end = tl.load(ends + tokens, mask=real, other=0)
        first, whole, whole_end, last = interval_blocks(start, end, real, other_length, OTHER_BLOCK)
    else:
        shift = other_length - length
        last_token = tl.minimum(first_token + BLOCK, length) - 1
        first, whole, whole_end, last = band_blocks(
            first_token, last_token, shift, other_length, BEFORE, AFTER, OTHER_BLOCK
        )
        start, end = tokens + (shift - BEFORE), tokens + (shift + AFTER + 1)
    segment = tokens
    if SEGMENTS:
        segment = tl.load(ids + tokens, mask=real, other=0)
        near, near_whole, near_whole_end, near_last = segment_blocks(segment, real, extremes, other_blocks, SEGMENTS)
        first, whole, whole_end, last = both(first, whole, whole_end, last, near, near_whole, near_whole_end, near_last)
    if MASK:
        whole_end = whole
    return start, end, segment, first, whole, whole_end, last


@triton.jit
def edge(t, whole, whole_end):
    """The t-th block of a range that leaves its whole blocks out."""
    return tl.where(t < whole, t, t + (whole_end - whole))


@triton.jit
def before_keys(sinks, head, SINKS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The state of the online softmax, the greatest logit and the sum relative to it, before the first block of keys.

    Sinks are logits without a value: they are in it, and so count once.
    """
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if SINKS:
        at = tl.arange(0, WIDTH)
        sink = tl.load(sinks + head * SINKS + at, mask=at < SINKS, other=-float("inf")).to(tl.float32)
        greatest = tl.maximum(tl.max(sink, 0), LOWEST / 2)
        top = tl.zeros([BLOCK], tl.float32) + greatest * LOG2E
        # The difference first: of a product and a number, of which one is the other rounded, little may be much.
        total += tl.sum(tl.exp2((sink - greatest) * LOG2E), 0)
    return top, total


@triton.jit
def tanh(x, CAP: tl.constexpr):
    """By one exponential, and right at both ends: 2 ** inf is inf, and 2 / inf is 0.

    Near 0 its error is that of a number near 1. A large cap would make it count: there a series is better.
    """
    bent = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
    if CAP > 100:
        square = x * x
        bent = tl.where(square < 0.01, x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0))), bent)
    return bent


@triton.jit
def added(bias):
    """A bias in units of log2. The lowest finite numbers, which many use for "hidden", stay finite: they hide nothing
    from a row that has nothing else.
    """
    bias = bias.to(tl.float32)
    return tl.where(bias == -float("inf"), bias, tl.maximum(bias * LOG2E, LOWEST / 2))


@triton.jit
def plane(base, queries, keys, real, k_length, q_stride, UNIT: tl.constexpr):
    """A tile of a bias or mask, whose rows are multiples of ``UNIT`` long; 0 where a row is one element for all keys.

    A thread loads several elements at once where the compiler sees that all of them are there, side by side.
    """
    place = base + queries.to(tl.int64)[:, None] * q_stride
    if UNIT > 0:
        there = keys < tl.cdiv(k_length, UNIT) * UNIT
        return tl.load(place + keys[None, :], mask=real[:, None] & there[None, :], other=0)
    return tl.broadcast_to(tl.load(place, mask=real[:, None], other=0), [queries.shape[0], keys.shape[0]])


@triton.jit
def multiple(number, UNIT: tl.constexpr):
    """Strides come divided by what they are multiples of: of a number at run time the compiler knows nothing."""
    if UNIT > 0:
        number *= UNIT
    return number


@triton.jit
def mix(x):
    """The mixer of the operation's dropout: see `ejkernel_ops.flash_attention.dropout`."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def row_state(seed, row, queries):
    """What the dropout of one head draws from, for each query."""
    state = mix(mix(tl.load(seed) + 0x9E3779B9) ^ row.to(tl.uint32))
    return mix(state ^ queries.to(tl.uint32))


@triton.jit
def kept(state, keys, THRESHOLD: tl.constexpr):
    """Which weights survive: ``state`` and ``keys`` broadcast to a tile."""
    return mix(state + keys.to(tl.uint32) * 0x9E3779B9) >= THRESHOLD
