"""The forward pass: one program a block of queries of one head, and a loop over the keys that the block can see."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel_triton.flash_attention._tile import (
    LN2,
    LOG2E,
    LOWEST,
    bias_in_log2,
    dropout_state,
    initial_softmax,
    is_slot_block_seen,
    keep_mask,
    key_end,
    key_places,
    load_bias_or_mask,
    load_keys,
    load_rows,
    partial_block,
    store_rows,
    tanh,
    times_unit,
    visible_blocks,
)


@triton.jit
def attend(
    query, key, value, bias, mask, q_ids, k_ids, k_extremes, row_start, row_end, sinks, seed,
    q_length, k_length, bias_b, bias_h, bias_q, mask_b, mask_h, mask_q, k_blocks,
    out, lse,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    PACKED: tl.constexpr, START: tl.constexpr, LENGTHS: tl.constexpr, SLOTS: tl.constexpr, SEGMENTS: tl.constexpr,
    BIAS: tl.constexpr, BIAS_UNIT: tl.constexpr, MASK: tl.constexpr, MASK_UNIT: tl.constexpr, SINKS: tl.constexpr,
    SINK_WIDTH: tl.constexpr, DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, NARROW: tl.constexpr, LSE: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """(batch, length, heads, dim) in and out; the log-sum-exp is (batch, heads, length).

    ``row_start`` and ``row_end`` are the interval of keys of each query with ``PACKED``. With ``START``, which excludes
    it, they are ``q_start`` and, with ``LENGTHS`` or ``SLOTS``, ``kv_lengths`` or ``kv_positions``: calls without these
    have no parameter for them.
    """
    bias_q, mask_q = times_unit(bias_q, BIAS_UNIT), times_unit(mask_q, MASK_UNIT)
    # One axis for all programs, because the others end at 65,535. With a causal mask the last block of queries sees the
    # most keys, so it comes first.
    blocks = tl.cdiv(q_length, Q_BLOCK)
    row, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
    batch, head = row // HEADS, row % HEADS
    kv_head = head // GROUP
    batch64 = batch.to(tl.int64)
    q_first = block * Q_BLOCK
    queries = q_first + tl.arange(0, Q_BLOCK)
    is_query = queries < q_length
    q_base = query + batch64 * q_length * (HEADS * DIM) + head * DIM
    k_base = key + batch64 * k_length * (HEADS // GROUP * DIM) + kv_head * DIM
    v_base = value + batch64 * k_length * (HEADS // GROUP * V_DIM) + kv_head * V_DIM
    q = load_rows(q_base, q_first, q_length, HEADS * DIM, Q_BLOCK, DIM, WIDTH, not EVEN_Q)

    k_end = key_end(row_end, batch, k_length, LENGTHS)
    TABLE_ROWS: tl.constexpr = 6 if SEGMENTS and SLOTS else 3
    start, end, ids, first, full, full_end, stop = visible_blocks(
        q_first, queries, is_query, row_start, row_end, q_ids + batch64 * q_length,
        k_extremes + batch64 * TABLE_ROWS * k_blocks, q_length, k_end, k_blocks, batch, LEFT, RIGHT, PACKED, SEGMENTS,
        MASK, START, SLOTS, Q_BLOCK, K_BLOCK,
    )  # fmt: skip

    row_max, row_sum = initial_softmax(sinks, head, SINKS, SINK_WIDTH, Q_BLOCK)
    sums = tl.zeros([Q_BLOCK, V_WIDTH], tl.float32)
    state = queries.to(tl.uint32)
    if DROPOUT > 0:
        state = dropout_state(seed, row, queries)
    bias_base = bias + times_unit(batch64 * bias_b + head.to(tl.int64) * bias_h, BIAS_UNIT)
    mask_base = mask + times_unit(batch64 * mask_b + head.to(tl.int64) * mask_h, MASK_UNIT)
    k_ids += batch64 * k_length
    slots = row_end
    slot_extremes, offset = k_extremes, 0
    if SLOTS:
        slots += batch64 * k_length
        slot_extremes += (batch64 * TABLE_ROWS + TABLE_ROWS - 3) * k_blocks
        offset = tl.load(row_start + batch)

    HAS_PARTIAL_BLOCKS: tl.constexpr = PACKED or SEGMENTS or MASK or LEFT >= 0 or RIGHT >= 0 or not EVEN_K
    if NARROW:
        # With so few blocks, a second loop would cost more than a branch, because it waits for its own first loads.
        for j in range(first, stop):
            row_max, row_sum, sums = _step(
                j, (j < full) | (j >= full_end), q, k_base, v_base, bias_base, mask_base, k_ids, slots, queries,
                is_query, ids, start, end, state, q_length, k_end, bias_q, mask_q, row_max, row_sum, sums,
                HEADS // GROUP * DIM, HEADS // GROUP * V_DIM, DIM, V_DIM, WIDTH, V_WIDTH, SCALE, CAP, LEFT, RIGHT,
                PACKED, SLOTS, SEGMENTS, BIAS, BIAS_UNIT, MASK, MASK_UNIT, DROPOUT, THRESHOLD, not EVEN_K, EVEN_K,
                PRECISION, K_BLOCK,
            )  # fmt: skip
    else:
        for j in range(full, full_end):
            row_max, row_sum, sums = _step(
                j, False, q, k_base, v_base, bias_base, mask_base, k_ids, slots, queries, is_query, ids, start, end,
                state, q_length, k_end, bias_q, mask_q, row_max, row_sum, sums,
                HEADS // GROUP * DIM, HEADS // GROUP * V_DIM, DIM, V_DIM, WIDTH, V_WIDTH, SCALE, CAP, LEFT, RIGHT,
                PACKED, SLOTS, SEGMENTS, BIAS, BIAS_UNIT, MASK, MASK_UNIT, DROPOUT, THRESHOLD, False, EVEN_K, PRECISION,
                K_BLOCK,
            )  # fmt: skip
        if HAS_PARTIAL_BLOCKS:
            for t in range(first, stop - (full_end - full)):
                j = partial_block(t, full, full_end)
                if not SLOTS or is_slot_block_seen(
                    j, q_first, q_length, offset, slot_extremes, k_blocks, LEFT, RIGHT, Q_BLOCK
                ):
                    row_max, row_sum, sums = _step(
                        j, True, q, k_base, v_base, bias_base, mask_base, k_ids, slots, queries, is_query, ids, start,
                        end, state, q_length, k_end, bias_q, mask_q, row_max, row_sum, sums,
                        HEADS // GROUP * DIM, HEADS // GROUP * V_DIM, DIM, V_DIM, WIDTH, V_WIDTH, SCALE, CAP, LEFT,
                        RIGHT, PACKED, SLOTS, SEGMENTS, BIAS, BIAS_UNIT, MASK, MASK_UNIT, DROPOUT, THRESHOLD, True,
                        EVEN_K, PRECISION, K_BLOCK,
                    )  # fmt: skip

    # A row that sees no key has a sum of 0: its output is 0, and its log-sum-exp is -inf.
    sums *= tl.where(row_sum > 0, 1.0 / ((1.0 - DROPOUT) * row_sum), 0.0)[:, None]
    out_base = out + batch64 * q_length * (HEADS * V_DIM) + head * V_DIM
    store_rows(out_base, q_first, q_length, sums, HEADS * V_DIM, Q_BLOCK, V_DIM, V_WIDTH)
    if LSE:
        row_lse = (row_max + tl.log2(row_sum)) * LN2
        if BIAS:
            # The limit of `bias_in_log2` stands for the lowest number.
            row_lse = tl.where(row_max <= LOWEST / 2, LOWEST, row_lse)
        row_lse = tl.where(row_sum > 0, row_lse, -float("inf"))
        tl.store(lse + row.to(tl.int64) * q_length + queries, row_lse, mask=is_query)


@triton.jit
def _step(
    j, is_partial, q, k_base, v_base, bias_base, mask_base, k_ids, slots, queries, is_query, ids, start, end, state,
    q_length, k_length, bias_q, mask_q, row_max, row_sum, sums,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    PACKED: tl.constexpr, SLOTS: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr, BIAS_UNIT: tl.constexpr,
    MASK: tl.constexpr, MASK_UNIT: tl.constexpr, DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr,
    CHECK_BOUNDS: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of keys, with masks if it ``is_partial``: a constant, or a value at run time."""
    k_first = j * K_BLOCK
    keys = k_first + tl.arange(0, K_BLOCK)
    k = load_keys(k_base, k_first, k_length, slots, K_STRIDE, K_BLOCK, DIM, WIDTH, CHECK_BOUNDS, SLOTS)
    logits = tl.dot(q, k.T, input_precision=PRECISION)
    # Without a soft cap or a bias, one instruction scales the logits and subtracts the maximum.
    UNIT: tl.constexpr = SCALE * LOG2E if CAP == 0 and not BIAS and SCALE > 1e-30 else 1.0
    if CAP > 0:
        logits = tanh(logits * (SCALE / CAP), CAP) * (CAP * LOG2E)
    elif BIAS or SCALE <= 1e-30:
        logits = logits * (SCALE * LOG2E)
    if BIAS:
        logits += bias_in_log2(load_bias_or_mask(bias_base, queries, keys, is_query, k_length, bias_q, BIAS_UNIT))
    if is_partial:
        visible = tl.full([1, 1], True, tl.int1)
        places, is_key = key_places(keys, k_length, slots, SLOTS)
        if not EVEN_K:
            visible = is_key[None, :]
        if PACKED or LEFT >= 0:
            visible = visible & (places[None, :] >= start[:, None])
        if PACKED or RIGHT >= 0:
            visible = visible & (places[None, :] < end[:, None])
        if SEGMENTS:
            key_ids = tl.load(k_ids + keys, mask=keys < k_length, other=0)
            visible = visible & (ids[:, None] == key_ids[None, :]) & (key_ids > 0)[None, :]
        if MASK:
            mask = load_bias_or_mask(mask_base, queries, keys, is_query, k_length, mask_q, MASK_UNIT)
            visible = visible & (mask != 0)
        logits = tl.where(visible, logits, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(logits, 1) * UNIT)
    rescale = tl.exp2(row_max - new_max)
    weights = tl.exp2(logits * UNIT - new_max[:, None])
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    if DROPOUT > 0:
        weights = tl.where(keep_mask(state[:, None], keys[None, :], THRESHOLD), weights, 0.0)
    v = load_keys(v_base, k_first, k_length, slots, V_STRIDE, K_BLOCK, V_DIM, V_WIDTH, CHECK_BOUNDS, SLOTS)
    sums = tl.dot(weights.to(v.dtype), v, sums * rescale[:, None], input_precision=PRECISION)
    return new_max, row_sum, sums
