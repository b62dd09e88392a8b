"""Attention over pages: a program has some tokens of a sequence, all heads of a key head, and a share of the keys.

Blocks of keys begin at multiples of their size, whatever the tile sees, and are found in the table of the sequence page
by page. Logits are in units of log2.

With a fixed size of parts, the bits of a result are those of the same operations in the same order, whether one program
has all parts or several programs have some each. Where a compiler could choose, the fused product and sum is written.
"""

# Triton's compiler gives the parameters their types.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel_triton.flash_attention._tile import LN2, LOG2E, LOWEST, tanh
from ejkernel_triton.flash_attention_decode._device import blocks_of_split, place_of, sinks_of


@triton.jit
def attend(
    query, keys, values, tables, kv_lens, starts, num_seqs, first_page, tiles, q_scale, k_scale, v_scale, sinks,
    tokens, sequences, table_length, page_count, tile_count,
    out, maxima, totals,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, KEY_STRIDE: tl.constexpr, KEY_STEP: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    VALUE_STEP: tl.constexpr, VALUES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    FIRST_PAGE: tl.constexpr, NUM_SEQS: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, Q_SCALES: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, SINKS: tl.constexpr,
    SINK_WIDTH: tl.constexpr, LSE: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr,
    TILE_HEADS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, PART_SIZE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """With one split, the results: ``out`` and, as ``maxima``, the log-sum-exp. With more, ``out`` are sums of values
    that are not divided by ``totals``, the sums of their weights relative to ``maxima``: (tokens, heads, parts). A
    split is one part, or with a ``PART_SIZE`` as many parts of so many keys as it has.
    """
    KV_HEADS: tl.constexpr = HEADS // GROUP
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    head_tile, kv_head, split, tile = place_of(tl.program_id(0), KV_HEADS, HEAD_TILES, SPLITS)
    own, token, stop, position, first, end = tile_at(
        tiles, kv_lens, starts, tile, tokens, table_length * PAGE_SIZE, tile_count, LEFT, RIGHT, TILE
    )
    owned_end = end_of_sequences(starts, num_seqs, sequences, NUM_SEQS)

    row = tl.arange(0, ROWS)
    group_head = head_tile * TILE_HEADS + row % TILE_HEADS
    is_head = (row < TILE * TILE_HEADS) & (group_head < GROUP)
    head = kv_head * GROUP + tl.minimum(group_head, GROUP - 1)
    own_token = token + row // TILE_HEADS
    is_row = is_head & (own_token < stop)
    place = own_token.to(tl.int64) * HEADS + head  # of a row among those of all tokens
    column, v_column = tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
    is_entry = is_row[:, None] & (column < DIM)[None, :]
    q = tl.load(query + place[:, None] * DIM + column[None, :], mask=is_entry, other=0.0)
    if q.dtype.is_fp8():
        q = q.to(tl.bfloat16)
    row_position = position + row // TILE_HEADS

    # Without scales and a soft cap, one instruction scales the logits and subtracts the maximum.
    scale = row * 0.0 + SCALE
    if Q_SCALES > 0:
        scale *= tl.load(q_scale + (head if Q_SCALES > 1 else head * 0))
    if K_SCALES > 0:
        scale *= tl.load(k_scale + (kv_head if K_SCALES > 1 else 0))
    of_values = 1.0
    if V_SCALES > 0:
        of_values = tl.load(v_scale + (kv_head if V_SCALES > 1 else 0))
    shift = 0
    if FIRST_PAGE:
        shift = tl.load(first_page)
    table = tables + own.to(tl.int64) * table_length
    # A slot and the next one are a stride apart, a head and the next one a step.
    keys += kv_head * KEY_STEP
    values += VALUES + kv_head * VALUE_STEP

    is_v_entry = is_row[:, None] & (v_column < V_DIM)[None, :]
    row_max = tl.full([ROWS], LOWEST, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, V_WIDTH], tl.float32)
    if PART_SIZE == 0:
        begin = first // BLOCK * BLOCK
        block, block_stop = blocks_of_split(begin, end, split, SPLITS, BLOCK)
        row_max, row_sum, sums = sums_of_blocks(
            q, keys, values, table, scale, row_position, shift, page_count, first, end,
            begin // BLOCK + block, begin // BLOCK + block_stop,
            KEY_STRIDE, VALUE_STRIDE, PAGE_SIZE, DIM, V_DIM, WIDTH, V_WIDTH, SCALE, CAP, LEFT, RIGHT,
            Q_SCALES + K_SCALES > 0, PRECISION, TILE, ROWS, BLOCK,
        )  # fmt: skip
        sums *= of_values
        if SPLITS > 1:
            part = place * PARTS + split
            # The sums of a split without keys are not read.
            is_stored = is_v_entry & (block < block_stop)
            tl.store(out + part[:, None] * V_DIM + v_column[None, :], sums, mask=is_stored)
            tl.store(maxima + part, row_max, mask=is_row)
            tl.store(totals + part, row_sum, mask=is_row)
    else:
        first_part = first // PART_SIZE
        share, share_stop = blocks_of_split(first_part * PART_SIZE, end, split, SPLITS, PART_SIZE)
        for number in range(first_part + share, first_part + share_stop):
            part_first = tl.maximum(first, number * PART_SIZE)
            part_end = tl.minimum(end, (number + 1) * PART_SIZE)
            part_max, part_sum, part_sums = sums_of_blocks(
                q, keys, values, table, scale, row_position, shift, page_count, part_first, part_end,
                part_first // BLOCK, tl.cdiv(part_end, BLOCK),
                KEY_STRIDE, VALUE_STRIDE, PAGE_SIZE, DIM, V_DIM, WIDTH, V_WIDTH, SCALE, CAP, LEFT, RIGHT,
                Q_SCALES + K_SCALES > 0, PRECISION, TILE, ROWS, BLOCK,
            )  # fmt: skip
            part_sums *= of_values
            if SPLITS > 1:
                part = place * PARTS + number
                tl.store(out + part[:, None] * V_DIM + v_column[None, :], part_sums, mask=is_v_entry)
                tl.store(maxima + part, part_max, mask=is_row)
                tl.store(totals + part, part_sum, mask=is_row)
            else:
                new_max, rescale, weight = weights_of(row_max, part_max)
                row_sum = tl.fma(row_sum, rescale, part_sum * weight)
                sums = tl.fma(sums, rescale[:, None], part_sums * weight[:, None])
                row_max = new_max

    if SPLITS == 1:
        sink, sink_max = sinks_of(sinks, head, SINKS, SINK_WIDTH)
        factor, row_lse = finished(row_max, row_sum, sink, sink_max)
        sums *= factor[:, None]
        tl.store(out + place[:, None] * V_DIM + v_column[None, :], sums.to(out.dtype.element_ty), mask=is_v_entry)
        # Tokens of no sequence come last. They are set to 0 by the tiles in whose places they would be, were all full.
        other_token = tile * TILE + row // TILE_HEADS
        is_other = is_head & (other_token >= owned_end) & (other_token < tokens)
        other = other_token * HEADS + head
        nothing = tl.zeros([ROWS, V_WIDTH], out.dtype.element_ty)
        is_other_entry = is_other[:, None] & (v_column < V_DIM)[None, :]
        tl.store(out + other[:, None] * V_DIM + v_column[None, :], nothing, mask=is_other_entry)
        if LSE:
            of_heads = maxima + head.to(tl.int64) * tokens
            tl.store(of_heads + own_token, row_lse, mask=is_row)
            tl.store(of_heads + other_token, -float("inf"), mask=is_other)


@triton.jit
def combine(
    parts, maxima, totals, kv_lens, starts, num_seqs, tiles, sinks,
    tokens, sequences, most_keys, tile_count,
    out, lse,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, NUM_SEQS: tl.constexpr,
    SINKS: tl.constexpr, SINK_WIDTH: tl.constexpr, LSE: tl.constexpr, TILE: tl.constexpr, PART_SIZE: tl.constexpr,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Some columns of one head of a token. The order of the sums is that of the parts, whichever program has ended
    first.
    """
    number = tl.program_id(0)
    chunk, number = number % CHUNKS, number // CHUNKS
    head, number = number % HEADS, number // HEADS
    i, tile = number % TILE, (number // TILE).to(tl.int64)
    _, token, stop, _, first, end = tile_at(
        tiles, kv_lens, starts, tile, tokens, most_keys, tile_count, LEFT, RIGHT, TILE
    )
    owned_end = end_of_sequences(starts, num_seqs, sequences, NUM_SEQS)
    token += i
    is_row = token < stop
    row = token.to(tl.int64) * HEADS + head
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < V_DIM
    if PART_SIZE == 0:
        part = row * PARTS + tl.arange(0, PARTS)
        part_max = tl.load(maxima + part, mask=is_row, other=LOWEST)
        part_sum = tl.load(totals + part, mask=is_row, other=0.0)
        row_max = tl.max(part_max, 0)
        weights = tl.exp2(part_max - row_max)
        row_sum = tl.sum(part_sum * weights, 0)
        is_part = (part_sum != 0)[:, None] & is_column[None, :]
        part_sums = tl.load(parts + part[:, None] * V_DIM + column[None, :], mask=is_part, other=0.0)
        sums = tl.sum(part_sums * weights[:, None], 0)
    else:
        row_max, row_sum = tl.full([], LOWEST, tl.float32), tl.full([], 0.0, tl.float32)
        sums = tl.zeros([COLUMNS], tl.float32)
        first_part, end_part = first // PART_SIZE, tl.cdiv(end, PART_SIZE)
        for part in range(first_part, tl.where(is_row, end_part, first_part)):
            part_sums = tl.load(parts + (row * PARTS + part) * V_DIM + column, mask=is_column, other=0.0)
            part_sum = tl.load(totals + row * PARTS + part)
            new_max, rescale, weight = weights_of(row_max, tl.load(maxima + row * PARTS + part))
            row_sum = tl.fma(row_sum, rescale, part_sum * weight)
            sums = tl.fma(sums, rescale, part_sums * weight)
            row_max = new_max
    sink, sink_max = sinks_of(sinks, head, SINKS, SINK_WIDTH)
    factor, row_lse = finished(row_max, row_sum, sink, sink_max)
    sums *= factor
    tl.store(out + row * V_DIM + column, sums.to(out.dtype.element_ty), mask=is_column & is_row)
    other_token = tile * TILE + i
    is_other = (other_token >= owned_end) & (other_token < tokens)
    nothing = tl.zeros([COLUMNS], out.dtype.element_ty)
    tl.store(out + (other_token * HEADS + head) * V_DIM + column, nothing, mask=is_column & is_other)
    if LSE:
        of_head = lse + head.to(tl.int64) * tokens
        tl.store(of_head + token, row_lse, mask=is_row & (chunk == 0))
        tl.store(of_head + other_token, -float("inf"), mask=is_other & (chunk == 0))


@triton.jit
def sums_of_blocks(
    q, keys, values, table, scale, row_position, shift, page_count, first, end, block, stop,
    KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr,
    V_DIM: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The maximum and the sum of the weights, and the sum of the values, of slots from ``first`` up to ``end`` that are
    in the blocks from ``block`` up to ``stop``.
    """
    UNIT: tl.constexpr = SCALE * LOG2E if ((CAP == 0 and SCALE > 1e-30) and not SCALED) else 1.0
    row_max = tl.full([ROWS], LOWEST, tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, V_WIDTH], tl.float32)
    entry = entries_of_block(table, block, stop, first, end, PAGE_SIZE, BLOCK)
    for j in range(block, stop):
        # A step's keys are fetched several steps ahead, by the entry that has been read one step before.
        next_entry = entries_of_block(table, j + 1, stop, first, end, PAGE_SIZE, BLOCK)
        slot = j * BLOCK + tl.arange(0, BLOCK)
        is_key = (slot >= first) & (slot < end)
        # An entry that is not a page must not lead out of the pages.
        page = tl.minimum(tl.maximum(entry + shift, 0), page_count - 1)
        place = page.to(tl.int64) * PAGE_SIZE + slot % PAGE_SIZE
        # What is not seen may be NaN: it is 0 here, in the values as well, whose weight of 0 would not be enough.
        k = load_rows(keys, place, is_key, KEY_STRIDE, DIM, WIDTH).to(q.dtype)
        logits = tl.dot(q, k.T, input_precision=PRECISION)
        if CAP > 0:
            logits = tanh(logits * (scale * (1.0 / CAP))[:, None], CAP) * (CAP * LOG2E)
        elif SCALE <= 1e-30 or SCALED:
            logits = logits * (scale * LOG2E)[:, None]
        visible = is_key[None, :]
        if TILE > 1 and LEFT >= 0:
            visible = visible & (slot[None, :] >= (row_position - LEFT)[:, None])
        if TILE > 1 and RIGHT >= 0:
            visible = visible & (slot[None, :] <= (row_position + RIGHT)[:, None])
        logits = tl.where(visible, logits, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(logits, 1) * UNIT)
        rescale = tl.exp2(row_max - new_max)
        weights = tl.exp2(logits * UNIT - new_max[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        v = load_rows(values, place, is_key, VALUE_STRIDE, V_DIM, V_WIDTH).to(q.dtype)
        sums = tl.dot(weights.to(q.dtype), v, sums * rescale[:, None], input_precision=PRECISION)
        row_max = new_max
        entry = next_entry
    return row_max, row_sum, sums


@triton.jit
def tile_at(tiles, kv_lens, starts, number, tokens, most_keys, count, LEFT: tl.constexpr, RIGHT: tl.constexpr,
            TILE: tl.constexpr):  # fmt: skip
    """The sequence of a tile, its first token and the one behind its last, the position of the first, and the slots
    that any of its tokens may see: from the first one up to the end. A place without a tile has no tokens and no slots.
    """
    sequence, token = tl.load(tiles + number), tl.load(tiles + count + number)
    is_tile, own = sequence >= 0, tl.maximum(sequence, 0)
    end = tl.where(is_tile, tl.load(starts + own + 1), token)
    length = tl.minimum(tl.maximum(tl.load(kv_lens + own), 0), most_keys)
    length = tl.where(is_tile, length, 0)
    position = length - (end - token)
    stop = tl.minimum(tl.minimum(token + TILE, end), tokens)
    last = position + (stop - token)  # behind the last position
    slot_first, slot_end = length * 0, length
    if LEFT >= 0:
        slot_first = tl.maximum(position - LEFT, 0)
    if RIGHT >= 0:
        slot_end = tl.maximum(tl.minimum(length, last + RIGHT), 0)
    # Where nothing is seen, no block is either.
    is_any = slot_first < slot_end
    return own, token, stop, position, tl.where(is_any, slot_first, 0), tl.where(is_any, slot_end, 0)


@triton.jit
def end_of_sequences(starts, num_seqs, sequences, NUM_SEQS: tl.constexpr):
    """The token behind the last one of a sequence."""
    count = sequences
    if NUM_SEQS:
        count = tl.minimum(tl.maximum(tl.load(num_seqs), 0), sequences)
    return tl.load(starts + count)


@triton.jit
def entries_of_block(table, block, stop, first, end, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The entries of the table for the slots of a block: one for all of them, or one for each. Those that no slot from
    ``first`` up to ``end`` has are not read.
    """
    if PAGE_SIZE % BLOCK == 0:
        entry = tl.load(table + block * BLOCK // PAGE_SIZE, mask=block < stop, other=0)
    else:
        slot = block * BLOCK + tl.arange(0, BLOCK)
        entry = tl.load(table + slot // PAGE_SIZE, mask=(slot >= first) & (slot < end), other=0)
    return entry


@triton.jit
def load_rows(base, place, is_key, STRIDE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of pages: 0 where ``is_key`` is false, and in the columns from ``DIM`` to ``WIDTH``."""
    column = tl.arange(0, WIDTH)
    pointers = base + place[:, None] * STRIDE + column[None, :]
    if DIM < WIDTH:
        return tl.load(pointers, mask=is_key[:, None] & (column < DIM)[None, :], other=0.0)
    return tl.load(pointers, mask=is_key[:, None], other=0.0)


@triton.jit
def weights_of(row_max, part_max):
    """The maximum of both, and the weights that sums relative to each have."""
    new_max = tl.maximum(row_max, part_max)
    return new_max, tl.exp2(row_max - new_max), tl.exp2(part_max - new_max)


@triton.jit
def finished(row_max, row_sum, sink, sink_max):
    """What the sums of values are multiplied by, and the log-sum-exp."""
    new_max, rescale, weight = weights_of(row_max, sink_max)
    total = tl.fma(row_sum, rescale, sink * weight)
    row_lse = tl.where(total != 0, (new_max + tl.log2(total)) * LN2, -float("inf"))
    return rescale * tl.where(total != 0, 1.0 / total, 0.0), row_lse
