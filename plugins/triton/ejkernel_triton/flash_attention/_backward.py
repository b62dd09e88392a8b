"""The backward pass, from the forward's log-sum-exp. It is deterministic, except with ``ATOMIC``.

It has two kernels. `sum_over_queries` keeps a block of keys and loops over the queries that see it, of all the heads
that share it, so that it finishes the gradients of keys and values itself, with grouped queries too. `sum_over_keys`
keeps a block of queries. Each computes the weights again, which costs two products of seven: less than to pass the
weights through memory.

The gradient of a logit is ``weight * (d_weight - delta)``. With a bias the host launches `exact_lse` first, because a
log-sum-exp far from 0 is too coarse to compute the weights from.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel_triton.flash_attention._tile import (
    LOG2E,
    bias_in_log2,
    dropout_state,
    initial_softmax,
    is_place_range_seen,
    is_slot_block_seen,
    keep_mask,
    key_end,
    key_places,
    load_bias_or_mask,
    load_keys,
    load_rows,
    partial_block,
    query_offset,
    store_rows,
    tanh,
    times_unit,
    visible_blocks,
    visible_queries,
    visible_segments,
)


@triton.jit
def exact_lse(
    query, key, lse, bias, mask, q_ids, k_ids, k_extremes, row_start, row_end, sinks,
    q_length, k_length, bias_b, bias_h, bias_q, mask_b, mask_h, mask_q, k_blocks,
    lse_base2, factors,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    PACKED: tl.constexpr, START: tl.constexpr, LENGTHS: tl.constexpr, SLOTS: tl.constexpr, SEGMENTS: tl.constexpr,
    BIAS_UNIT: tl.constexpr, MASK: tl.constexpr, MASK_UNIT: tl.constexpr, SINKS: tl.constexpr,
    SINK_WIDTH: tl.constexpr, DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr, PRECISION: tl.constexpr,
    FAR: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp of each row in units of log2, inf for a row that sees no key, and the factor that corrects the
    weights of the row for the rounding of that log-sum-exp. It is 1, except for a row that is ``FAR`` from 0, whose sum
    is computed again.
    """
    blocks = tl.cdiv(q_length, Q_BLOCK)
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    q_first = block * Q_BLOCK
    queries = q_first + tl.arange(0, Q_BLOCK)
    is_query = queries < q_length
    offsets = row.to(tl.int64) * q_length + queries
    row_lse = tl.load(lse + offsets, mask=is_query, other=-float("inf"))
    is_far = (tl.abs(row_lse) > FAR) & (tl.abs(row_lse) < float("inf"))
    base2 = tl.where(row_lse == -float("inf"), float("inf"), row_lse * LOG2E)
    factor = tl.full([Q_BLOCK], 1.0, tl.float32)
    if tl.max(is_far.to(tl.int32), 0) > 0:
        row_max, row_sum = _softmax_of_rows(
            row // HEADS, row % HEADS, q_first, queries, is_query, query, key, bias, mask, q_ids, k_ids, k_extremes,
            row_start, row_end, sinks, q_length, k_length, bias_b, bias_h, times_unit(bias_q, BIAS_UNIT), mask_b,
            mask_h, times_unit(mask_q, MASK_UNIT), k_blocks,
            HEADS, GROUP, DIM, WIDTH, SCALE, CAP, LEFT, RIGHT, PACKED, START, LENGTHS, SLOTS, SEGMENTS, BIAS_UNIT, MASK,
            MASK_UNIT, SINKS, SINK_WIDTH, PRECISION, Q_BLOCK, K_BLOCK,
        )  # fmt: skip
        log_sum = tl.log2(row_sum)
        sum_lse = row_max + log_sum
        rounded_log_sum = sum_lse - row_max  # exact, because the two numbers are so close
        # At the very lowest numbers a row may be empty here that was not empty in another kernel's forward.
        base2 = tl.where(is_far, tl.where(row_sum > 0, sum_lse, float("inf")), base2)
        factor = tl.where(is_far & (row_sum > 0), tl.exp2(rounded_log_sum - log_sum), factor)
    tl.store(lse_base2 + offsets, base2, mask=is_query)
    tl.store(factors + offsets, factor, mask=is_query)


@triton.jit
def _softmax_of_rows(
    batch, head, q_first, queries, is_query, query, key, bias, mask, q_ids, k_ids, k_extremes, row_start, row_end,
    sinks, q_length, k_length, bias_b, bias_h, bias_q, mask_b, mask_h, mask_q, k_blocks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr,
    CAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PACKED: tl.constexpr, START: tl.constexpr,
    LENGTHS: tl.constexpr, SLOTS: tl.constexpr, SEGMENTS: tl.constexpr,
    BIAS_UNIT: tl.constexpr, MASK: tl.constexpr, MASK_UNIT: tl.constexpr, SINKS: tl.constexpr,
    SINK_WIDTH: tl.constexpr, PRECISION: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """The maximum of the logits of each query of a block, and the sum relative to it."""
    batch64 = batch.to(tl.int64)
    K_STRIDE: tl.constexpr = HEADS // GROUP * DIM
    k_base = key + batch64 * k_length * K_STRIDE + head // GROUP * DIM
    q_base = query + batch64 * q_length * (HEADS * DIM) + head * DIM
    q = load_rows(q_base, q_first, q_length, HEADS * DIM, Q_BLOCK, DIM, WIDTH, True)
    k_end = key_end(row_end, batch, k_length, LENGTHS)
    slots = row_end
    if SLOTS:
        slots += batch64 * k_length
    TABLE_ROWS: tl.constexpr = 6 if SEGMENTS and SLOTS else 3
    start, end, ids, first, _whole, _whole_end, stop = visible_blocks(
        q_first, queries, is_query, row_start, row_end, q_ids + batch64 * q_length,
        k_extremes + batch64 * TABLE_ROWS * k_blocks, q_length, k_end, k_blocks, batch, LEFT, RIGHT, PACKED, SEGMENTS,
        MASK, START, SLOTS, Q_BLOCK, K_BLOCK,
    )  # fmt: skip
    bias_base = bias + times_unit(batch64 * bias_b + head.to(tl.int64) * bias_h, BIAS_UNIT)
    mask_base = mask + times_unit(batch64 * mask_b + head.to(tl.int64) * mask_h, MASK_UNIT)
    k_ids += batch64 * k_length
    row_max, row_sum = initial_softmax(sinks, head, SINKS, SINK_WIDTH, Q_BLOCK)
    for j in range(first, stop):
        k = load_keys(k_base, j * K_BLOCK, k_end, slots, K_STRIDE, K_BLOCK, DIM, WIDTH, True, SLOTS)
        keys = j * K_BLOCK + tl.arange(0, K_BLOCK)
        places, is_key = key_places(keys, k_end, slots, SLOTS)
        logits, _cap_derivative = _logits(
            tl.dot(q, k.T, input_precision=PRECISION), queries, keys, places, is_query, is_key, start, end, ids, k_ids,
            bias_base, mask_base, k_end, bias_q, mask_q, SCALE, CAP, LEFT, RIGHT, PACKED, SEGMENTS, True, BIAS_UNIT,
            MASK, MASK_UNIT, True, False, False,
        )  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        row_sum = row_sum * tl.exp2(row_max - new_max) + tl.sum(tl.exp2(logits - new_max[:, None]), 1)
        row_max = new_max
    return row_max, row_sum


@triton.jit
def sum_over_keys(
    query, key, value, d_out, lse, delta, bias, mask, q_ids, k_ids, k_extremes, row_start, row_end, seed,
    q_length, k_length, bias_b, bias_h, bias_q, mask_b, mask_h, mask_q, k_blocks,
    d_query,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    PACKED: tl.constexpr, START: tl.constexpr, LENGTHS: tl.constexpr, SLOTS: tl.constexpr, SEGMENTS: tl.constexpr,
    BIAS: tl.constexpr, BIAS_UNIT: tl.constexpr, MASK: tl.constexpr, MASK_UNIT: tl.constexpr, DROPOUT: tl.constexpr,
    THRESHOLD: tl.constexpr, EVEN_Q: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one block of queries of one head."""
    bias_q, mask_q = times_unit(bias_q, BIAS_UNIT), times_unit(mask_q, MASK_UNIT)
    blocks = tl.cdiv(q_length, Q_BLOCK)
    row, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
    batch, head = row // HEADS, row % HEADS
    kv_head = head // GROUP
    batch64 = batch.to(tl.int64)
    K_STRIDE: tl.constexpr = HEADS // GROUP * DIM
    V_STRIDE: tl.constexpr = HEADS // GROUP * V_DIM
    q_first = block * Q_BLOCK
    queries = q_first + tl.arange(0, Q_BLOCK)
    is_query = queries < q_length
    q_base = query + batch64 * q_length * (HEADS * DIM) + head * DIM
    d_base = d_out + batch64 * q_length * (HEADS * V_DIM) + head * V_DIM
    k_base = key + batch64 * k_length * K_STRIDE + kv_head * DIM
    v_base = value + batch64 * k_length * V_STRIDE + kv_head * V_DIM
    q = load_rows(q_base, q_first, q_length, HEADS * DIM, Q_BLOCK, DIM, WIDTH, not EVEN_Q)
    d = load_rows(d_base, q_first, q_length, HEADS * V_DIM, Q_BLOCK, V_DIM, V_WIDTH, not EVEN_Q)
    row_lse = tl.load(lse + row.to(tl.int64) * q_length + queries, mask=is_query, other=float("inf"))
    row_delta = tl.load(delta + row.to(tl.int64) * q_length + queries, mask=is_query, other=0.0)

    k_end = key_end(row_end, batch, k_length, LENGTHS)
    TABLE_ROWS: tl.constexpr = 6 if SEGMENTS and SLOTS else 3
    start, end, ids, first, full, full_end, stop = visible_blocks(
        q_first, queries, is_query, row_start, row_end, q_ids + batch64 * q_length,
        k_extremes + batch64 * TABLE_ROWS * k_blocks, q_length, k_end, k_blocks, batch, LEFT, RIGHT, PACKED, SEGMENTS,
        MASK, START, SLOTS, Q_BLOCK, K_BLOCK,
    )  # fmt: skip
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

    sums = tl.zeros([Q_BLOCK, WIDTH], tl.float32)
    for j in range(full, full_end):
        k = load_rows(k_base, j * K_BLOCK, k_length, K_STRIDE, K_BLOCK, DIM, WIDTH, False)
        v = load_rows(v_base, j * K_BLOCK, k_length, V_STRIDE, K_BLOCK, V_DIM, V_WIDTH, False)
        keys = j * K_BLOCK + tl.arange(0, K_BLOCK)
        d_logits = _logit_gradients(
            q, k, v, d, queries, keys, keys, is_query, keys < k_end, row_lse, row_delta, start, end, ids, k_ids, state,
            bias_base, mask_base, k_end, bias_q, mask_q, SCALE, CAP, LEFT, RIGHT, PACKED, SEGMENTS, BIAS, BIAS_UNIT,
            MASK, MASK_UNIT, DROPOUT, THRESHOLD, False, False, EVEN_K, PRECISION,
        )  # fmt: skip
        sums = tl.dot(d_logits.to(k.dtype), k, sums, input_precision=PRECISION)
    if PACKED or SEGMENTS or MASK or LEFT >= 0 or RIGHT >= 0 or not EVEN_K:
        for t in range(first, stop - (full_end - full)):
            j = partial_block(t, full, full_end)
            if not SLOTS or is_slot_block_seen(
                j, q_first, q_length, offset, slot_extremes, k_blocks, LEFT, RIGHT, Q_BLOCK
            ):
                k = load_keys(k_base, j * K_BLOCK, k_end, slots, K_STRIDE, K_BLOCK, DIM, WIDTH, True, SLOTS)
                v = load_keys(v_base, j * K_BLOCK, k_end, slots, V_STRIDE, K_BLOCK, V_DIM, V_WIDTH, True, SLOTS)
                keys = j * K_BLOCK + tl.arange(0, K_BLOCK)
                places, is_key = key_places(keys, k_end, slots, SLOTS)
                d_logits = _logit_gradients(
                    q, k, v, d, queries, keys, places, is_query, is_key, row_lse, row_delta, start, end, ids, k_ids,
                    state, bias_base, mask_base, k_end, bias_q, mask_q, SCALE, CAP, LEFT, RIGHT, PACKED, SEGMENTS, BIAS,
                    BIAS_UNIT, MASK, MASK_UNIT, DROPOUT, THRESHOLD, True, False, EVEN_K, PRECISION,
                )  # fmt: skip
                sums = tl.dot(d_logits.to(k.dtype), k, sums, input_precision=PRECISION)
    d_q_base = d_query + batch64 * q_length * (HEADS * DIM) + head * DIM
    store_rows(d_q_base, q_first, q_length, sums * SCALE, HEADS * DIM, Q_BLOCK, DIM, WIDTH)


@triton.jit
def sum_over_queries(
    query, key, value, d_out, lse, delta, bias, mask, q_ids, k_ids, q_extremes, column_start, column_end, seed,
    q_length, k_length, bias_b, bias_h, bias_q, mask_b, mask_h, mask_q, q_blocks,
    d_key, d_value, d_query,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    PACKED: tl.constexpr, START: tl.constexpr, LENGTHS: tl.constexpr, SLOTS: tl.constexpr, SEGMENTS: tl.constexpr,
    BIAS: tl.constexpr, BIAS_UNIT: tl.constexpr, MASK: tl.constexpr, MASK_UNIT: tl.constexpr, DROPOUT: tl.constexpr,
    THRESHOLD: tl.constexpr, EVEN_Q: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, DISABLE_LICM: tl.constexpr, ATOMIC: tl.constexpr, Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of one block of keys and values of one kv head. Tiles are (keys, queries) here."""
    bias_q, mask_q = times_unit(bias_q, BIAS_UNIT), times_unit(mask_q, MASK_UNIT)
    # With a causal mask the first block of keys is seen by the most queries.
    blocks = tl.cdiv(k_length, K_BLOCK)
    kv_row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    KV_HEADS: tl.constexpr = HEADS // GROUP
    batch, kv_head = kv_row // KV_HEADS, kv_row % KV_HEADS
    batch64 = batch.to(tl.int64)
    k_first = block * K_BLOCK
    keys = k_first + tl.arange(0, K_BLOCK)
    slots = column_end
    if SLOTS:
        slots += batch64 * k_length
    k_end = key_end(column_end, batch, k_length, LENGTHS)
    places, is_key = key_places(keys, k_end, slots, SLOTS)
    k_base = key + batch64 * k_length * (KV_HEADS * DIM) + kv_head * DIM
    v_base = value + batch64 * k_length * (KV_HEADS * V_DIM) + kv_head * V_DIM
    k = load_keys(k_base, k_first, k_end, slots, KV_HEADS * DIM, K_BLOCK, DIM, WIDTH, not EVEN_K, SLOTS)
    v = load_keys(v_base, k_first, k_end, slots, KV_HEADS * V_DIM, K_BLOCK, V_DIM, V_WIDTH, not EVEN_K, SLOTS)

    # The queries that see a key have it on their left, so they are on its right.
    if START:
        start, end, first, full, full_end, stop = visible_queries(
            places, is_key, tl.load(column_start + batch), q_length, LEFT, RIGHT, Q_BLOCK
        )
        ids, first, full, full_end, stop = visible_segments(
            first, full, full_end, stop, keys, is_key, k_ids + batch64 * k_length, q_extremes + batch64 * 3 * q_blocks,
            q_blocks, SEGMENTS, MASK,
        )  # fmt: skip
    else:
        start, end, ids, first, full, full_end, stop = visible_blocks(
            k_first, keys, is_key, column_start, column_end, k_ids + batch64 * k_length,
            q_extremes + batch64 * 3 * q_blocks, k_length, q_length, q_blocks, batch, RIGHT, LEFT, PACKED,
            SEGMENTS, MASK, False, 0, K_BLOCK, Q_BLOCK,
        )  # fmt: skip
    q_ids += batch64 * q_length

    k_sums = tl.zeros([K_BLOCK, WIDTH], tl.float32)
    v_sums = tl.zeros([K_BLOCK, V_WIDTH], tl.float32)
    for group_member in range(GROUP):
        head = kv_head * GROUP + group_member
        row = batch * HEADS + head
        q_place = batch64 * q_length * (HEADS * DIM) + head * DIM
        q_base = query + q_place
        d_base = d_out + batch64 * q_length * (HEADS * V_DIM) + head * V_DIM
        row_base = row.to(tl.int64) * q_length
        bias_base = bias + times_unit(batch64 * bias_b + head.to(tl.int64) * bias_h, BIAS_UNIT)
        mask_base = mask + times_unit(batch64 * mask_b + head.to(tl.int64) * mask_h, MASK_UNIT)
        # Registers are full. With ``DISABLE_LICM`` they hold nothing that can be computed again, and the loop over
        # partial blocks, which are few, fetches nothing ahead.
        for i in tl.range(full, full_end, disable_licm=DISABLE_LICM):
            k_sums, v_sums = _add_queries(
                i, q_base, d_base, lse + row_base, delta + row_base, bias_base, mask_base, q_ids, seed, row, k, v,
                keys, is_key, start, end, ids, q_length, k_length, bias_q, mask_q, k_sums, v_sums, d_query + q_place,
                HEADS * DIM, HEADS * V_DIM, DIM, V_DIM, WIDTH, V_WIDTH, SCALE, CAP, LEFT, RIGHT, PACKED, SEGMENTS,
                BIAS, BIAS_UNIT, MASK, MASK_UNIT, DROPOUT, THRESHOLD, False, ATOMIC, PRECISION, Q_BLOCK,
            )  # fmt: skip
        if PACKED or SEGMENTS or MASK or LEFT >= 0 or RIGHT >= 0 or not EVEN_Q:
            for t in tl.range(first, stop - (full_end - full), disable_licm=DISABLE_LICM, num_stages=1):
                k_sums, v_sums = _add_queries(
                    partial_block(t, full, full_end), q_base, d_base, lse + row_base, delta + row_base, bias_base,
                    mask_base, q_ids, seed, row, k, v, keys, is_key, start, end, ids, q_length, k_length, bias_q,
                    mask_q, k_sums, v_sums, d_query + q_place,
                    HEADS * DIM, HEADS * V_DIM, DIM, V_DIM, WIDTH, V_WIDTH, SCALE, CAP, LEFT, RIGHT, PACKED, SEGMENTS,
                    BIAS, BIAS_UNIT, MASK, MASK_UNIT, DROPOUT, THRESHOLD, True, ATOMIC, PRECISION, Q_BLOCK,
                )  # fmt: skip
    if LENGTHS or SLOTS:
        # The rows of slots that hold no key were computed from keys and values of 0.
        k_sums = tl.where(is_key[:, None], k_sums, 0.0)
        v_sums = tl.where(is_key[:, None], v_sums, 0.0)
    store_rows(
        d_key + batch64 * k_length * (KV_HEADS * DIM) + kv_head * DIM, k_first, k_length, k_sums * SCALE,
        KV_HEADS * DIM, K_BLOCK, DIM, WIDTH,
    )  # fmt: skip
    store_rows(
        d_value + batch64 * k_length * (KV_HEADS * V_DIM) + kv_head * V_DIM, k_first, k_length,
        v_sums * (1.0 / (1.0 - DROPOUT)), KV_HEADS * V_DIM, K_BLOCK, V_DIM, V_WIDTH,
    )  # fmt: skip


@triton.jit
def _add_queries(
    i, q_base, d_base, lse, delta, bias_base, mask_base, q_ids, seed, row, k, v, keys, is_key, start, end, ids,
    q_length, k_length, bias_q, mask_q, k_sums, v_sums, d_query,
    Q_STRIDE: tl.constexpr, D_STRIDE: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    PACKED: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr, BIAS_UNIT: tl.constexpr, MASK: tl.constexpr,
    MASK_UNIT: tl.constexpr, DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr, IS_PARTIAL: tl.constexpr,
    ATOMIC: tl.constexpr, PRECISION: tl.constexpr, Q_BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of queries."""
    q_first = i * Q_BLOCK
    queries = q_first + tl.arange(0, Q_BLOCK)
    is_query = queries < q_length
    q = load_rows(q_base, q_first, q_length, Q_STRIDE, Q_BLOCK, DIM, WIDTH, IS_PARTIAL)
    d = load_rows(d_base, q_first, q_length, D_STRIDE, Q_BLOCK, V_DIM, V_WIDTH, IS_PARTIAL)
    if IS_PARTIAL:
        row_lse = tl.load(lse + queries, mask=is_query, other=float("inf"))
        row_delta = tl.load(delta + queries, mask=is_query, other=0.0)
    else:
        row_lse = tl.load(lse + queries)
        row_delta = tl.load(delta + queries)
    state = queries.to(tl.uint32)
    if DROPOUT > 0:
        state = dropout_state(seed, row, queries)
    logits, cap_derivative = _logits(
        tl.dot(k, q.T, input_precision=PRECISION), keys, queries, queries, is_key, is_query, start, end, ids, q_ids,
        bias_base, mask_base, k_length, bias_q, mask_q, SCALE, CAP, LEFT, RIGHT, PACKED, SEGMENTS, BIAS, BIAS_UNIT,
        MASK, MASK_UNIT, IS_PARTIAL, True, False,
    )  # fmt: skip
    weights = _weights(logits - row_lse[None, :], BIAS)
    d_weights = tl.dot(v, d.T, input_precision=PRECISION)
    dropout_weights = weights
    if DROPOUT > 0:
        keeps = keep_mask(state[None, :], keys[:, None], THRESHOLD)
        dropout_weights = tl.where(keeps, weights, 0.0)
        d_weights = tl.where(keeps, d_weights * (1.0 / (1.0 - DROPOUT)), 0.0)
    v_sums = tl.dot(dropout_weights.to(d.dtype), d, v_sums, input_precision=PRECISION)
    d_logits = weights * (d_weights - row_delta[None, :])
    if CAP > 0:
        d_logits *= cap_derivative
    k_sums = tl.dot(d_logits.to(q.dtype), q, k_sums, input_precision=PRECISION)
    if ATOMIC:
        rows = d_query + q_first.to(tl.int64) * Q_STRIDE + (tl.arange(0, Q_BLOCK) * Q_STRIDE)[:, None]
        column = tl.arange(0, WIDTH)[None, :]
        d_logits = tl.where(is_key[:, None], d_logits, 0.0)  # the product sums over padding, too
        product = tl.dot(d_logits.to(k.dtype).T, k, input_precision=PRECISION) * SCALE
        tl.atomic_add(rows + column, product, mask=is_query[:, None] & (column < DIM), sem="relaxed")
    return k_sums, v_sums


@triton.jit
def sum_into_bias(
    query, key, value, d_out, lse, delta, bias, mask, q_ids, k_ids, row_start, row_end, seed,
    q_length, k_length, bias_b, bias_h, bias_q, mask_b, mask_h, mask_q, batches, batch_step, head_step, q_step, k_step,
    d_bias,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    PACKED: tl.constexpr, START: tl.constexpr, LENGTHS: tl.constexpr, SLOTS: tl.constexpr, SEGMENTS: tl.constexpr,
    BIAS_Q: tl.constexpr, BIAS_UNIT: tl.constexpr, MASK: tl.constexpr,
    MASK_UNIT: tl.constexpr, DROPOUT: tl.constexpr,
    THRESHOLD: tl.constexpr, PRECISION: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of the bias, summed over the axes along which the bias was broadcast.

    A program starts with a query block, a key block and a head, and goes on by each ``*_step`` over all tiles that have
    the same indices in ``d_bias``: other batches, heads, and blocks along an axis of size 1.
    """
    bias_q, mask_q = times_unit(bias_q, BIAS_UNIT), times_unit(mask_q, MASK_UNIT)
    q_start = tl.program_id(0) % q_step
    k_start, row = tl.program_id(0) // q_step % k_step, tl.program_id(0) // q_step // k_step
    batch_start, head_start = row // head_step, row % head_step
    sums = tl.zeros([Q_BLOCK, K_BLOCK], tl.float32)
    for batch in range(batch_start, batches, batch_step):
        for head in range(head_start, HEADS, head_step):
            for i in range(q_start, tl.cdiv(q_length, Q_BLOCK), q_step):
                for j in range(k_start, tl.cdiv(k_length, K_BLOCK), k_step):
                    if not START or _is_tile_seen(
                        batch, i, j, row_start, row_end, q_length, k_length, LEFT, RIGHT, LENGTHS, SLOTS, Q_BLOCK,
                        K_BLOCK,
                    ):  # fmt: skip
                        sums += _tile_gradients(
                            batch, head, i, j, query, key, value, d_out, lse, delta, bias, mask, q_ids, k_ids,
                            row_start, row_end, seed, q_length, k_length, bias_b, bias_h, bias_q, mask_b, mask_h,
                            mask_q,
                            HEADS, GROUP, DIM, V_DIM, WIDTH, V_WIDTH, SCALE, CAP, LEFT, RIGHT, PACKED, START, LENGTHS,
                            SLOTS, SEGMENTS, BIAS_UNIT, MASK, MASK_UNIT, DROPOUT, THRESHOLD, PRECISION, Q_BLOCK,
                            K_BLOCK,
                        )  # fmt: skip
    # The gradient is contiguous. Its larger strides are not arguments: jax-triton takes none of more than 31 bits.
    stride = k_length if BIAS_UNIT > 0 else 1
    base = d_bias + row.to(tl.int64) * (q_length if BIAS_Q else 1) * stride
    queries = q_start * Q_BLOCK + tl.arange(0, Q_BLOCK)
    keys = k_start * K_BLOCK + tl.arange(0, K_BLOCK)
    if BIAS_Q and BIAS_UNIT > 0:
        pointers = base + queries.to(tl.int64)[:, None] * stride + keys[None, :]
        tl.store(pointers, sums, mask=(queries < q_length)[:, None] & (keys < k_length)[None, :])
    elif BIAS_UNIT > 0:
        tl.store(base + keys, tl.sum(sums, 0), mask=keys < k_length)
    elif BIAS_Q:
        tl.store(base + queries, tl.sum(sums, 1), mask=queries < q_length)
    else:
        tl.store(base, tl.sum(tl.sum(sums, 1), 0))


@triton.jit
def _is_tile_seen(
    batch, i, j, q_start, key_positions, q_length, k_length,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, LENGTHS: tl.constexpr, SLOTS: tl.constexpr, Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Whether any query of a block may see any key of a block, by their positions."""
    keys = j * K_BLOCK + tl.arange(0, K_BLOCK)
    slots = key_positions + tl.cast(batch, tl.int64) * k_length if SLOTS else key_positions
    places, is_key = key_places(keys, key_end(key_positions, batch, k_length, LENGTHS), slots, SLOTS)
    low, high = tl.min(tl.where(is_key, places, 2147483647), 0), tl.max(tl.where(is_key, places, -1), 0)
    first_place = tl.load(q_start + batch) + i * Q_BLOCK
    return is_place_range_seen(low, high, first_place, first_place + Q_BLOCK - 1, LEFT, RIGHT)


@triton.jit
def _tile_gradients(
    batch, head, i, j, query, key, value, d_out, lse, delta, bias, mask, q_ids, k_ids, row_start, row_end, seed,
    q_length, k_length, bias_b, bias_h, bias_q, mask_b, mask_h, mask_q,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    PACKED: tl.constexpr, START: tl.constexpr, LENGTHS: tl.constexpr, SLOTS: tl.constexpr, SEGMENTS: tl.constexpr,
    BIAS_UNIT: tl.constexpr, MASK: tl.constexpr, MASK_UNIT: tl.constexpr,
    DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr,
    PRECISION: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of the logits of any tile."""
    batch64, head64 = tl.cast(batch, tl.int64), tl.cast(head, tl.int64)
    row64 = batch64 * HEADS + head64
    KV_HEADS: tl.constexpr = HEADS // GROUP
    kv_head = head // GROUP
    q_first, k_first = i * Q_BLOCK, j * K_BLOCK
    queries, keys = q_first + tl.arange(0, Q_BLOCK), k_first + tl.arange(0, K_BLOCK)
    slots = row_end
    if SLOTS:
        slots += batch64 * k_length
    k_end = key_end(row_end, batch, k_length, LENGTHS)
    is_query = queries < q_length
    places, is_key = key_places(keys, k_end, slots, SLOTS)
    q_base = query + batch64 * q_length * (HEADS * DIM) + head * DIM
    d_base = d_out + batch64 * q_length * (HEADS * V_DIM) + head * V_DIM
    k_base = key + batch64 * k_length * (KV_HEADS * DIM) + kv_head * DIM
    v_base = value + batch64 * k_length * (KV_HEADS * V_DIM) + kv_head * V_DIM
    q = load_rows(q_base, q_first, q_length, HEADS * DIM, Q_BLOCK, DIM, WIDTH, True)
    d = load_rows(d_base, q_first, q_length, HEADS * V_DIM, Q_BLOCK, V_DIM, V_WIDTH, True)
    k = load_keys(k_base, k_first, k_end, slots, KV_HEADS * DIM, K_BLOCK, DIM, WIDTH, True, SLOTS)
    v = load_keys(v_base, k_first, k_end, slots, KV_HEADS * V_DIM, K_BLOCK, V_DIM, V_WIDTH, True, SLOTS)
    row_lse = tl.load(lse + row64 * q_length + queries, mask=is_query, other=float("inf"))
    row_delta = tl.load(delta + row64 * q_length + queries, mask=is_query, other=0.0)
    offset = query_offset(row_start, batch, q_length, k_length, START)
    start, end = queries + (offset - LEFT), queries + (offset + RIGHT + 1)
    if PACKED:
        start = tl.load(row_start + queries, mask=is_query, other=0)
        end = tl.load(row_end + queries, mask=is_query, other=0)
    ids = queries
    if SEGMENTS:
        ids = tl.load(q_ids + batch64 * q_length + queries, mask=is_query, other=0)
    state = queries.to(tl.uint32)
    if DROPOUT > 0:
        state = dropout_state(seed, row64, queries)
    return _logit_gradients(
        q, k, v, d, queries, keys, places, is_query, is_key, row_lse, row_delta, start, end, ids,
        k_ids + batch64 * k_length, state, bias + times_unit(batch64 * bias_b + head64 * bias_h, BIAS_UNIT),
        mask + times_unit(batch64 * mask_b + head64 * mask_h, MASK_UNIT), k_length, bias_q, mask_q,
        SCALE, CAP, LEFT, RIGHT, PACKED, SEGMENTS, True, BIAS_UNIT, MASK, MASK_UNIT, DROPOUT, THRESHOLD, True, True,
        False, PRECISION,
    )  # fmt: skip


@triton.jit
def _logit_gradients(
    q, k, v, d, queries, keys, places, is_query, is_key, row_lse, row_delta, start, end, ids, k_ids, state, bias_base,
    mask_base, k_length, bias_q, mask_q,
    SCALE: tl.constexpr, CAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PACKED: tl.constexpr,
    SEGMENTS: tl.constexpr, BIAS: tl.constexpr, BIAS_UNIT: tl.constexpr, MASK: tl.constexpr, MASK_UNIT: tl.constexpr,
    DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr, IS_PARTIAL: tl.constexpr, OF_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of the logits of a tile (queries, keys), before the soft cap, or with ``OF_BIAS`` after it."""
    logits, cap_derivative = _logits(
        tl.dot(q, k.T, input_precision=PRECISION), queries, keys, places, is_query, is_key, start, end, ids, k_ids,
        bias_base, mask_base, k_length, bias_q, mask_q, SCALE, CAP, LEFT, RIGHT, PACKED, SEGMENTS, BIAS, BIAS_UNIT,
        MASK, MASK_UNIT, IS_PARTIAL, False, EVEN_K,
    )  # fmt: skip
    weights = _weights(logits - row_lse[:, None], BIAS)
    d_weights = tl.dot(d, v.T, input_precision=PRECISION)
    if DROPOUT > 0:
        keeps = keep_mask(state[:, None], keys[None, :], THRESHOLD)
        d_weights = tl.where(keeps, d_weights * (1.0 / (1.0 - DROPOUT)), 0.0)
    d_logits = weights * (d_weights - row_delta[:, None])
    if CAP > 0 and not OF_BIAS:
        d_logits *= cap_derivative
    return d_logits


@triton.jit
def _weights(differences, BIAS: tl.constexpr):
    """The weights, from the differences of logits and the log-sum-exp of their row."""
    if BIAS:
        # With a huge bias, neighbouring floats are many powers of 2 apart, and a logit whose product was summed in
        # another order than in `exact_lse` may be rounded above the log-sum-exp.
        differences = tl.minimum(differences, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.exp2(differences)


@triton.jit
def _logits(
    products, rows, columns, places, is_row, is_column, start, end, ids, other_ids, bias_base, mask_base, k_length,
    bias_q, mask_q,
    SCALE: tl.constexpr, CAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PACKED: tl.constexpr,
    SEGMENTS: tl.constexpr, BIAS: tl.constexpr, BIAS_UNIT: tl.constexpr, MASK: tl.constexpr, MASK_UNIT: tl.constexpr,
    IS_PARTIAL: tl.constexpr, IS_TRANSPOSED: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Logits in units of log2, and the derivative of the soft cap.

    ``start`` and ``end`` are the interval of columns of each row, by the ``places`` of columns. Rows are queries, or
    keys if ``IS_TRANSPOSED``.
    """
    cap_derivative = products
    if CAP > 0:
        capped = tanh(products * (SCALE / CAP), CAP)
        cap_derivative = 1.0 - capped * capped
        logits = capped * (CAP * LOG2E)
    else:
        logits = products * (SCALE * LOG2E)
    if BIAS:
        if IS_TRANSPOSED:
            bias = load_bias_or_mask(bias_base, columns, rows, is_column, k_length, bias_q, BIAS_UNIT)
            logits += bias_in_log2(bias).T
        else:
            logits += bias_in_log2(load_bias_or_mask(bias_base, rows, columns, is_row, k_length, bias_q, BIAS_UNIT))
    if IS_PARTIAL:
        # Padding among the queries has a log-sum-exp of inf and so no weight. Rows that are padding are not stored.
        visible = tl.full([1, 1], True, tl.int1)
        if not IS_TRANSPOSED and not EVEN_K:
            visible = is_column[None, :]
        # How far a row sees. A query that sees keys on its left is on the right of these keys.
        ROW_LEFT: tl.constexpr = RIGHT if IS_TRANSPOSED else LEFT
        ROW_RIGHT: tl.constexpr = LEFT if IS_TRANSPOSED else RIGHT
        if PACKED or ROW_LEFT >= 0:
            visible = visible & (places[None, :] >= start[:, None])
        if PACKED or ROW_RIGHT >= 0:
            visible = visible & (places[None, :] < end[:, None])
        if SEGMENTS:
            column_ids = tl.load(other_ids + columns, mask=is_column, other=0)
            visible = visible & (ids[:, None] == column_ids[None, :]) & (column_ids > 0)[None, :]
        if MASK:
            if IS_TRANSPOSED:
                mask = load_bias_or_mask(mask_base, columns, rows, is_column, k_length, mask_q, MASK_UNIT).T
            else:
                mask = load_bias_or_mask(mask_base, rows, columns, is_row, k_length, mask_q, MASK_UNIT)
            visible = visible & (mask != 0)
        logits = tl.where(visible, logits, -float("inf"))
    return logits, cap_derivative
