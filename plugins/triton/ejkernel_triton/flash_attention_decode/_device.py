"""Attention of few queries: the keys of a row of the batch are split over programs, whose sums are then combined.

A program has all queries of all heads that share a key head, so that it reads each key once. Logits are in units of
log2.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel_triton.flash_attention._tile import LN2, LOG2E, LOWEST, tanh


@triton.jit
def attend(
    query, key, value, q_starts, kv_lengths, kv_positions, sinks,
    k_length,
    out, maxima, totals,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, STARTS: tl.constexpr, LENGTHS: tl.constexpr, POSITIONS: tl.constexpr, SINKS: tl.constexpr,
    SINK_WIDTH: tl.constexpr, LSE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With one split, the results: ``out`` and, as ``maxima``, the log-sum-exp. With more, ``out`` are sums of values
    that are not divided by ``totals``, the sums of their weights relative to ``maxima``: (batch, queries, heads,
    splits).
    """
    KV_HEADS: tl.constexpr = HEADS // GROUP
    tile, kv_head, split, batch = place_of(tl.program_id(0), KV_HEADS, TILES, SPLITS)
    row = tile * ROWS + tl.arange(0, ROWS)
    is_row = row < QUERIES * GROUP
    head = kv_head * GROUP + row % GROUP
    place = (batch * QUERIES + row // GROUP) * HEADS + head  # of a row among all of them
    column, v_column = tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
    is_entry = is_row[:, None] & (column < DIM)[None, :]
    q = tl.load(query + place[:, None] * DIM + column[None, :], mask=is_entry, other=0.0)

    q_start, first, end = seen_keys(q_starts, kv_lengths, k_length, batch, QUERIES, LEFT, RIGHT, STARTS, LENGTHS,
                                    POSITIONS)  # fmt: skip
    q_position = q_start + row // GROUP
    block, stop = blocks_of_split(first, end, split, SPLITS, BLOCK)

    key += batch * k_length * (KV_HEADS * DIM) + kv_head * DIM
    value += batch * k_length * (KV_HEADS * V_DIM) + kv_head * V_DIM
    kv_positions += batch * k_length
    # Without a soft cap, one instruction scales the logits and subtracts the maximum.
    UNIT: tl.constexpr = SCALE * LOG2E if CAP == 0 and SCALE > 1e-30 else 1.0
    row_max = tl.full([ROWS], LOWEST, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, V_WIDTH], tl.float32)
    for j in range(block, stop):
        slot = first + j * BLOCK + tl.arange(0, BLOCK)
        is_key = slot < end
        position = slot
        if POSITIONS:
            position = tl.load(kv_positions + slot, mask=is_key, other=-1)
            is_key = position >= 0
            # A key that no query sees is not fetched.
            if LEFT >= 0:
                is_key = is_key & (position >= q_start - LEFT)
            if RIGHT >= 0:
                is_key = is_key & (position < q_start + (QUERIES + RIGHT))
        # What is not seen may be NaN: it is 0 here, in the values as well, whose weight of 0 would not be enough.
        k = load_keys(key, slot, is_key, KV_HEADS * DIM, DIM, WIDTH)
        logits = tl.dot(q, k.T, input_precision=PRECISION)
        if CAP > 0:
            logits = tanh(logits * (SCALE / CAP), CAP) * (CAP * LOG2E)
        elif SCALE <= 1e-30:
            logits = logits * (SCALE * LOG2E)
        visible = is_key[None, :]
        if QUERIES > 1 and LEFT >= 0:
            visible = visible & (position[None, :] >= (q_position - LEFT)[:, None])
        if QUERIES > 1 and RIGHT >= 0:
            visible = visible & (position[None, :] <= (q_position + RIGHT)[:, None])
        logits = tl.where(visible, logits, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(logits, 1) * UNIT)
        rescale = tl.exp2(row_max - new_max)
        weights = tl.exp2(logits * UNIT - new_max[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        v = load_keys(value, slot, is_key, KV_HEADS * V_DIM, V_DIM, V_WIDTH)
        sums = tl.dot(weights.to(v.dtype), v, sums * rescale[:, None], input_precision=PRECISION)
        row_max = new_max

    is_v_entry = is_row[:, None] & (v_column < V_DIM)[None, :]
    if SPLITS == 1:
        sink, sink_max = sinks_of(sinks, head, SINKS, SINK_WIDTH)
        new_max = tl.maximum(row_max, sink_max)
        rescale = tl.exp2(row_max - new_max)
        total = row_sum * rescale + sink * tl.exp2(sink_max - new_max)
        sums *= (rescale * tl.where(total != 0, 1.0 / total, 0.0))[:, None]
        tl.store(out + place[:, None] * V_DIM + v_column[None, :], sums.to(out.dtype.element_ty), mask=is_v_entry)
        if LSE:
            row_lse = tl.where(total != 0, (new_max + tl.log2(total)) * LN2, -float("inf"))
            tl.store(maxima + (batch * HEADS + head) * QUERIES + row // GROUP, row_lse, mask=is_row)
    else:
        part = place * SPLITS + split
        # The sums of a split without keys are not read.
        tl.store(out + part[:, None] * V_DIM + v_column[None, :], sums, mask=is_v_entry & (block < stop))
        tl.store(maxima + part, row_max, mask=is_row)
        tl.store(totals + part, row_sum, mask=is_row)


@triton.jit
def combine(
    parts, maxima, totals, sinks,
    out, lse,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, V_DIM: tl.constexpr, SINKS: tl.constexpr, SINK_WIDTH: tl.constexpr,
    LSE: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Some columns of one row. The order of the sums is that of the splits, whichever program has ended first."""
    row, chunk = (tl.program_id(0) // CHUNKS).to(tl.int64), tl.program_id(0) % CHUNKS
    head = row % HEADS
    part = row * SPLITS + tl.arange(0, SPLITS)
    split_max, split_sum = tl.load(maxima + part), tl.load(totals + part)
    sink, sink_max = sinks_of(sinks, head, SINKS, SINK_WIDTH)
    row_max = tl.maximum(tl.max(split_max, 0), sink_max)
    weights = tl.exp2(split_max - row_max)
    total = tl.sum(split_sum * weights, 0) + sink * tl.exp2(sink_max - row_max)
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < V_DIM
    is_part = (split_sum != 0)[:, None] & is_column[None, :]
    sums = tl.load(parts + part[:, None] * V_DIM + column[None, :], mask=is_part, other=0.0)
    result = tl.sum(sums * weights[:, None], 0) * tl.where(total != 0, 1.0 / total, 0.0)
    tl.store(out + row * V_DIM + column, result.to(out.dtype.element_ty), mask=is_column)
    if LSE:
        row_lse = tl.where(total != 0, (row_max + tl.log2(total)) * LN2, -float("inf"))
        batch, i = row // (QUERIES * HEADS), row // HEADS % QUERIES
        tl.store(lse + (batch * HEADS + head) * QUERIES + i, row_lse, mask=chunk == 0)


@triton.jit
def place_of(number, KV_HEADS: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr):
    """The tile, the key head, the split and the row of the batch of the part with this number."""
    # Heads are next to each other in memory. Parts that are read at the same time are of the same pages of it.
    tile, number = number % TILES, number // TILES
    kv_head, number = number % KV_HEADS, number // KV_HEADS
    return tile, kv_head, number % SPLITS, (number // SPLITS).to(tl.int64)


@triton.jit
def blocks_of_split(first, end, split, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The first of the blocks of keys that a split has, and the one behind the last."""
    blocks = tl.cdiv(end - first, BLOCK)
    block = split * (blocks // SPLITS) + tl.minimum(split, blocks % SPLITS)
    return block, block + blocks // SPLITS + (split < blocks % SPLITS).to(tl.int32)


@triton.jit
def seen_keys(q_starts, kv_lengths, k_length, batch, QUERIES: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
              STARTS: tl.constexpr, LENGTHS: tl.constexpr, POSITIONS: tl.constexpr):  # fmt: skip
    """The position of the first query, and the slots of keys that any query may see: from ``first`` up to ``end``.

    Whatever the numbers are, these are slots of the cache.
    """
    # A length of 1 is a constant in Triton: this is a tensor all the same.
    end = (batch * 0 + k_length).to(tl.int32)
    q_start = end - QUERIES
    if STARTS:
        q_start = tl.load(q_starts + batch)
    if LENGTHS:
        end = tl.minimum(tl.maximum(tl.load(kv_lengths + batch), 0), end)
    first = end * 0
    if not POSITIONS:  # else they are in any order
        if LEFT >= 0:
            first = tl.minimum(tl.maximum(q_start - LEFT, 0), end)
        if RIGHT >= 0:
            end = tl.maximum(tl.minimum(end, q_start + (QUERIES + RIGHT)), first)
    return q_start, first, end


@triton.jit
def load_keys(base, slot, is_key, STRIDE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """The keys or values of these slots: 0 where ``is_key`` is false, and in the columns from ``DIM`` to ``WIDTH``."""
    column = tl.arange(0, WIDTH)
    pointers = base + slot.to(tl.int64)[:, None] * STRIDE + column[None, :]
    if DIM < WIDTH:
        return tl.load(pointers, mask=is_key[:, None] & (column < DIM)[None, :], other=0.0)
    return tl.load(pointers, mask=is_key[:, None], other=0.0)


@triton.jit
def sinks_of(sinks, head, SINKS: tl.constexpr, WIDTH: tl.constexpr):
    """The sum of the exponentials of a head's sinks relative to the largest of them, and that one in units of log2.

    ``head`` is one or a vector. Without sinks, the sum is 0.
    """
    index = tl.arange(0, WIDTH)
    total = head * 0.0
    largest = total + LOWEST
    if SINKS > 0:
        offset = tl.expand_dims(head * SINKS, -1) + index
        sink = tl.load(sinks + offset, mask=index < SINKS, other=-float("inf")).to(tl.float32)
        highest = tl.maximum(tl.max(sink, -1), LOWEST / 2)
        # Subtract before scaling: the difference of two rounded products would have a large relative error.
        total = tl.sum(tl.exp2((sink - tl.expand_dims(highest, -1)) * LOG2E), -1)
        largest = highest * LOG2E
    return total, largest
