"""The backward pass, from the forward's log-sum-exp: deterministic, unless it is asked to add up by atomics.

Two kernels. `sum_over_queries` keeps a block of keys and walks over the queries that see it, of all the heads that
share it: so the gradients of keys and values are finished where they are made, grouped queries or not.
`sum_over_keys` keeps a block of queries. Each computes the weights anew, which costs two products of seven, and is
cheaper than passing them through memory.

The gradient of a logit is ``weight * (d_weight - shift)``; the host prepares ``shift``: see `_rows`. With a bias it
asks `find_tops` before, because there are log-sum-exps that do not tell the weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel_triton.flash_attention._tile import (
    LOG2E,
    added,
    before_keys,
    edge,
    in_sight,
    kept,
    load_rows,
    multiple,
    plane,
    row_state,
    store_rows,
    tanh,
)


@triton.jit
def find_tops(
    query, key, lse, bias, mask, q_ids, k_ids, k_extremes, row_start, row_end, sinks,
    q_length, k_length, bias_b, bias_h, bias_q, mask_b, mask_h, mask_q, k_blocks,
    tops, factors,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    PACKED: tl.constexpr, SEGMENTS: tl.constexpr, BIAS_UNIT: tl.constexpr, MASK: tl.constexpr, MASK_UNIT: tl.constexpr,
    SINKS: tl.constexpr, SINK_WIDTH: tl.constexpr, DROP: tl.constexpr, THRESHOLD: tl.constexpr,
    PRECISION: tl.constexpr, FAR: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp of each row in units of log2, inf where a row saw nothing; and the factor that its rounding takes
    from the row's weights: 1, but where a row is ``FAR`` from 0, whose sum is made anew.
    """
    blocks = tl.cdiv(q_length, Q_BLOCK)
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    q_first = block * Q_BLOCK
    queries = q_first + tl.arange(0, Q_BLOCK)
    real = queries < q_length
    place = row.to(tl.int64) * q_length + queries
    found = tl.load(lse + place, mask=real, other=-float("inf"))
    far = (tl.abs(found) > FAR) & (tl.abs(found) < float("inf"))
    top = tl.where(found == -float("inf"), float("inf"), found * LOG2E)
    factor = tl.full([Q_BLOCK], 1.0, tl.float32)
    if tl.max(far.to(tl.int32), 0) > 0:
        greatest, total = _sum_of_rows(
            row // HEADS, row % HEADS, q_first, queries, real, query, key, bias, mask, q_ids, k_ids, k_extremes,
            row_start, row_end, sinks, q_length, k_length, bias_b, bias_h, multiple(bias_q, BIAS_UNIT), mask_b, mask_h,
            multiple(mask_q, MASK_UNIT), k_blocks,
            HEADS, GROUP, DIM, WIDTH, SCALE, CAP, BEFORE, AFTER, PACKED, SEGMENTS, BIAS_UNIT, MASK, MASK_UNIT, SINKS,
            SINK_WIDTH, PRECISION, Q_BLOCK, K_BLOCK,
        )  # fmt: skip
        above = tl.log2(total)
        rounded = greatest + above
        held = rounded - greatest  # exactly, of two numbers so close
        # At the very lowest numbers another kernel's forward may have seen what is nothing here.
        top = tl.where(far, tl.where(total > 0, rounded, float("inf")), top)
        factor = tl.where(far & (total > 0), tl.exp2(held - above), factor)
    tl.store(tops + place, top, mask=real)
    tl.store(factors + place, factor, mask=real)


@triton.jit
def _sum_of_rows(
    batch, head, q_first, queries, real, query, key, bias, mask, q_ids, k_ids, k_extremes, row_start, row_end, sinks,
    q_length, k_length, bias_b, bias_h, bias_q, mask_b, mask_h, mask_q, k_blocks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr,
    CAP: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, PACKED: tl.constexpr, SEGMENTS: tl.constexpr,
    BIAS_UNIT: tl.constexpr, MASK: tl.constexpr, MASK_UNIT: tl.constexpr, SINKS: tl.constexpr,
    SINK_WIDTH: tl.constexpr, PRECISION: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """The greatest logit of each query of a block, and the sum relative to it."""
    batch64 = batch.to(tl.int64)
    K_STRIDE: tl.constexpr = HEADS // GROUP * DIM
    k_base = key + batch64 * k_length * K_STRIDE + head // GROUP * DIM
    q_base = query + batch64 * q_length * (HEADS * DIM) + head * DIM
    q = load_rows(q_base, q_first, q_length, HEADS * DIM, Q_BLOCK, DIM, WIDTH, True)
    start, end, ids, first, _whole, _whole_end, last = in_sight(
        q_first, queries, real, row_start, row_end, q_ids + batch64 * q_length, k_extremes + batch64 * 3 * k_blocks,
        q_length, k_length, k_blocks, BEFORE, AFTER, PACKED, SEGMENTS, MASK, Q_BLOCK, K_BLOCK,
    )  # fmt: skip
    bias_base = bias + multiple(batch64 * bias_b + head.to(tl.int64) * bias_h, BIAS_UNIT)
    mask_base = mask + multiple(batch64 * mask_b + head.to(tl.int64) * mask_h, MASK_UNIT)
    k_ids += batch64 * k_length
    top, total = before_keys(sinks, head, SINKS, SINK_WIDTH, Q_BLOCK)
    for j in range(first, last):
        k = load_rows(k_base, j * K_BLOCK, k_length, K_STRIDE, K_BLOCK, DIM, WIDTH, True)
        keys = j * K_BLOCK + tl.arange(0, K_BLOCK)
        logits, _slope = _logits(
            tl.dot(q, k.T, input_precision=PRECISION), queries, keys, real, keys < k_length, start, end, ids, k_ids,
            bias_base, mask_base, k_length, bias_q, mask_q, SCALE, CAP, BEFORE, AFTER, PACKED, SEGMENTS, True,
            BIAS_UNIT, MASK, MASK_UNIT, True, False, False,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(logits - new_top[:, None]), 1)
        top = new_top
    return top, total


@triton.jit
def sum_over_keys(
    query, key, value, d_out, lse, shifts, bias, mask, q_ids, k_ids, k_extremes, row_start, row_end, seed,
    q_length, k_length, bias_b, bias_h, bias_q, mask_b, mask_h, mask_q, k_blocks,
    d_query,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    PACKED: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr, BIAS_UNIT: tl.constexpr, MASK: tl.constexpr,
    MASK_UNIT: tl.constexpr, DROP: tl.constexpr,
    THRESHOLD: tl.constexpr, EVEN_Q: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one block of queries of one head."""
    bias_q, mask_q = multiple(bias_q, BIAS_UNIT), multiple(mask_q, MASK_UNIT)
    blocks = tl.cdiv(q_length, Q_BLOCK)
    row, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
    batch, head = row // HEADS, row % HEADS
    kv_head = head // GROUP
    batch64 = batch.to(tl.int64)
    K_STRIDE: tl.constexpr = HEADS // GROUP * DIM
    V_STRIDE: tl.constexpr = HEADS // GROUP * V_DIM
    q_first = block * Q_BLOCK
    queries = q_first + tl.arange(0, Q_BLOCK)
    real = queries < q_length
    q_base = query + batch64 * q_length * (HEADS * DIM) + head * DIM
    d_base = d_out + batch64 * q_length * (HEADS * V_DIM) + head * V_DIM
    k_base = key + batch64 * k_length * K_STRIDE + kv_head * DIM
    v_base = value + batch64 * k_length * V_STRIDE + kv_head * V_DIM
    q = load_rows(q_base, q_first, q_length, HEADS * DIM, Q_BLOCK, DIM, WIDTH, not EVEN_Q)
    d = load_rows(d_base, q_first, q_length, HEADS * V_DIM, Q_BLOCK, V_DIM, V_WIDTH, not EVEN_Q)
    top = tl.load(lse + row.to(tl.int64) * q_length + queries, mask=real, other=float("inf"))
    shift = tl.load(shifts + row.to(tl.int64) * q_length + queries, mask=real, other=0.0)

    start, end, ids, first, whole, whole_end, last = in_sight(
        q_first, queries, real, row_start, row_end, q_ids + batch64 * q_length, k_extremes + batch64 * 3 * k_blocks,
        q_length, k_length, k_blocks, BEFORE, AFTER, PACKED, SEGMENTS, MASK, Q_BLOCK, K_BLOCK,
    )  # fmt: skip
    state = queries.to(tl.uint32)
    if DROP > 0:
        state = row_state(seed, row, queries)
    bias_base = bias + multiple(batch64 * bias_b + head.to(tl.int64) * bias_h, BIAS_UNIT)
    mask_base = mask + multiple(batch64 * mask_b + head.to(tl.int64) * mask_h, MASK_UNIT)
    k_ids += batch64 * k_length

    sums = tl.zeros([Q_BLOCK, WIDTH], tl.float32)
    for j in range(whole, whole_end):
        k = load_rows(k_base, j * K_BLOCK, k_length, K_STRIDE, K_BLOCK, DIM, WIDTH, False)
        v = load_rows(v_base, j * K_BLOCK, k_length, V_STRIDE, K_BLOCK, V_DIM, V_WIDTH, False)
        keys = j * K_BLOCK + tl.arange(0, K_BLOCK)
        slopes = _slopes(
            q, k, v, d, queries, keys, real, keys < k_length, top, shift, start, end, ids, k_ids, state, bias_base,
            mask_base, k_length, bias_q, mask_q, SCALE, CAP, BEFORE, AFTER, PACKED, SEGMENTS, BIAS, BIAS_UNIT, MASK,
            MASK_UNIT, DROP, THRESHOLD, False, False, EVEN_K, PRECISION,
        )  # fmt: skip
        sums = tl.dot(slopes.to(k.dtype), k, sums, input_precision=PRECISION)
    if PACKED or SEGMENTS or MASK or BEFORE >= 0 or AFTER >= 0 or not EVEN_K:
        for t in range(first, last - (whole_end - whole)):
            j = edge(t, whole, whole_end)
            k = load_rows(k_base, j * K_BLOCK, k_length, K_STRIDE, K_BLOCK, DIM, WIDTH, True)
            v = load_rows(v_base, j * K_BLOCK, k_length, V_STRIDE, K_BLOCK, V_DIM, V_WIDTH, True)
            keys = j * K_BLOCK + tl.arange(0, K_BLOCK)
            slopes = _slopes(
                q, k, v, d, queries, keys, real, keys < k_length, top, shift, start, end, ids, k_ids, state, bias_base,
                mask_base, k_length, bias_q, mask_q, SCALE, CAP, BEFORE, AFTER, PACKED, SEGMENTS, BIAS, BIAS_UNIT,
                MASK, MASK_UNIT, DROP, THRESHOLD, True, False, EVEN_K, PRECISION,
            )  # fmt: skip
            sums = tl.dot(slopes.to(k.dtype), k, sums, input_precision=PRECISION)
    d_q_base = d_query + batch64 * q_length * (HEADS * DIM) + head * DIM
    store_rows(d_q_base, q_first, q_length, sums * SCALE, HEADS * DIM, Q_BLOCK, DIM, WIDTH)


@triton.jit
def sum_over_queries(
    query, key, value, d_out, lse, shifts, bias, mask, q_ids, k_ids, q_extremes, column_start, column_end, seed,
    q_length, k_length, bias_b, bias_h, bias_q, mask_b, mask_h, mask_q, q_blocks,
    d_key, d_value, d_query,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    PACKED: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr, BIAS_UNIT: tl.constexpr, MASK: tl.constexpr,
    MASK_UNIT: tl.constexpr, DROP: tl.constexpr,
    THRESHOLD: tl.constexpr, EVEN_Q: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, LEAN: tl.constexpr, ATOMIC: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of one block of keys and values of one kv head. Tiles are (keys, queries) here."""
    bias_q, mask_q = multiple(bias_q, BIAS_UNIT), multiple(mask_q, MASK_UNIT)
    # The first block of keys is seen by most under a causal mask, and comes first as it is.
    blocks = tl.cdiv(k_length, K_BLOCK)
    kv_row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    KV_HEADS: tl.constexpr = HEADS // GROUP
    batch, kv_head = kv_row // KV_HEADS, kv_row % KV_HEADS
    batch64 = batch.to(tl.int64)
    k_first = block * K_BLOCK
    keys = k_first + tl.arange(0, K_BLOCK)
    real = keys < k_length
    k_base = key + batch64 * k_length * (KV_HEADS * DIM) + kv_head * DIM
    v_base = value + batch64 * k_length * (KV_HEADS * V_DIM) + kv_head * V_DIM
    k = load_rows(k_base, k_first, k_length, KV_HEADS * DIM, K_BLOCK, DIM, WIDTH, not EVEN_K)
    v = load_rows(v_base, k_first, k_length, KV_HEADS * V_DIM, K_BLOCK, V_DIM, V_WIDTH, not EVEN_K)

    # Seen from a key, what its queries see before them lies behind it.
    start, end, ids, first, whole, whole_end, last = in_sight(
        k_first, keys, real, column_start, column_end, k_ids + batch64 * k_length, q_extremes + batch64 * 3 * q_blocks,
        k_length, q_length, q_blocks, AFTER, BEFORE, PACKED, SEGMENTS, MASK, K_BLOCK, Q_BLOCK,
    )  # fmt: skip
    q_ids += batch64 * q_length

    k_sums = tl.zeros([K_BLOCK, WIDTH], tl.float32)
    v_sums = tl.zeros([K_BLOCK, V_WIDTH], tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        row = batch * HEADS + head
        q_place = batch64 * q_length * (HEADS * DIM) + head * DIM
        q_base = query + q_place
        d_base = d_out + batch64 * q_length * (HEADS * V_DIM) + head * V_DIM
        row_base = row.to(tl.int64) * q_length
        bias_base = bias + multiple(batch64 * bias_b + head.to(tl.int64) * bias_h, BIAS_UNIT)
        mask_base = mask + multiple(batch64 * mask_b + head.to(tl.int64) * mask_h, MASK_UNIT)
        # Registers are full. Where ``LEAN``, nothing is kept in them that can be computed again; and at the edges, of
        # which there are few, nothing is fetched ahead.
        for i in tl.range(whole, whole_end, disable_licm=LEAN):
            k_sums, v_sums = _queries(
                i, q_base, d_base, lse + row_base, shifts + row_base, bias_base, mask_base, q_ids, seed, row, k, v,
                keys, real, start, end, ids, q_length, k_length, bias_q, mask_q, k_sums, v_sums, d_query + q_place,
                HEADS * DIM, HEADS * V_DIM, DIM, V_DIM, WIDTH, V_WIDTH, SCALE, CAP, BEFORE, AFTER, PACKED, SEGMENTS,
                BIAS, BIAS_UNIT, MASK, MASK_UNIT, DROP, THRESHOLD, False, ATOMIC, PRECISION, Q_BLOCK,
            )  # fmt: skip
        if PACKED or SEGMENTS or MASK or BEFORE >= 0 or AFTER >= 0 or not EVEN_Q:
            for t in tl.range(first, last - (whole_end - whole), disable_licm=LEAN, num_stages=1):
                k_sums, v_sums = _queries(
                    edge(t, whole, whole_end), q_base, d_base, lse + row_base, shifts + row_base, bias_base, mask_base,
                    q_ids, seed, row, k, v, keys, real, start, end, ids, q_length, k_length, bias_q, mask_q, k_sums,
                    v_sums, d_query + q_place,
                    HEADS * DIM, HEADS * V_DIM, DIM, V_DIM, WIDTH, V_WIDTH, SCALE, CAP, BEFORE, AFTER, PACKED,
                    SEGMENTS, BIAS, BIAS_UNIT, MASK, MASK_UNIT, DROP, THRESHOLD, True, ATOMIC, PRECISION, Q_BLOCK,
                )  # fmt: skip
    store_rows(
        d_key + batch64 * k_length * (KV_HEADS * DIM) + kv_head * DIM, k_first, k_length, k_sums * SCALE,
        KV_HEADS * DIM, K_BLOCK, DIM, WIDTH,
    )  # fmt: skip
    store_rows(
        d_value + batch64 * k_length * (KV_HEADS * V_DIM) + kv_head * V_DIM, k_first, k_length,
        v_sums * (1.0 / (1.0 - DROP)), KV_HEADS * V_DIM, K_BLOCK, V_DIM, V_WIDTH,
    )  # fmt: skip


@triton.jit
def _queries(
    i, q_base, d_base, lse, shifts, bias_base, mask_base, q_ids, seed, row, k, v, keys, real, start, end, ids,
    q_length, k_length, bias_q, mask_q, k_sums, v_sums, d_query,
    Q_STRIDE: tl.constexpr, D_STRIDE: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    PACKED: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr, BIAS_UNIT: tl.constexpr, MASK: tl.constexpr,
    MASK_UNIT: tl.constexpr, DROP: tl.constexpr, THRESHOLD: tl.constexpr, EDGE: tl.constexpr, ATOMIC: tl.constexpr,
    PRECISION: tl.constexpr, Q_BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of queries."""
    q_first = i * Q_BLOCK
    queries = q_first + tl.arange(0, Q_BLOCK)
    there = queries < q_length
    q = load_rows(q_base, q_first, q_length, Q_STRIDE, Q_BLOCK, DIM, WIDTH, EDGE)
    d = load_rows(d_base, q_first, q_length, D_STRIDE, Q_BLOCK, V_DIM, V_WIDTH, EDGE)
    if EDGE:
        top = tl.load(lse + queries, mask=there, other=float("inf"))
        shift = tl.load(shifts + queries, mask=there, other=0.0)
    else:
        top = tl.load(lse + queries)
        shift = tl.load(shifts + queries)
    state = queries.to(tl.uint32)
    if DROP > 0:
        state = row_state(seed, row, queries)
    logits, slope = _logits(
        tl.dot(k, q.T, input_precision=PRECISION), keys, queries, real, there, start, end, ids, q_ids, bias_base,
        mask_base, k_length, bias_q, mask_q, SCALE, CAP, BEFORE, AFTER, PACKED, SEGMENTS, BIAS, BIAS_UNIT, MASK,
        MASK_UNIT, EDGE, True, False,
    )  # fmt: skip
    weights = _weights(logits - top[None, :], BIAS)
    d_weights = tl.dot(v, d.T, input_precision=PRECISION)
    used = weights
    if DROP > 0:
        keep = kept(state[None, :], keys[:, None], THRESHOLD)
        used = tl.where(keep, weights, 0.0)
        d_weights = tl.where(keep, d_weights * (1.0 / (1.0 - DROP)), 0.0)
    v_sums = tl.dot(used.to(d.dtype), d, v_sums, input_precision=PRECISION)
    slopes = weights * (d_weights - shift[None, :])
    if CAP > 0:
        slopes *= slope
    k_sums = tl.dot(slopes.to(q.dtype), q, k_sums, input_precision=PRECISION)
    if ATOMIC:
        place = d_query + q_first.to(tl.int64) * Q_STRIDE + (tl.arange(0, Q_BLOCK) * Q_STRIDE)[:, None]
        column = tl.arange(0, WIDTH)[None, :]
        slopes = tl.where(real[:, None], slopes, 0.0)  # rows that are no keys are added up here, too
        part = tl.dot(slopes.to(k.dtype).T, k, input_precision=PRECISION) * SCALE
        tl.atomic_add(place + column, part, mask=there[:, None] & (column < DIM), sem="relaxed")
    return k_sums, v_sums


@triton.jit
def sum_into_bias(
    query, key, value, d_out, lse, shifts, bias, mask, q_ids, k_ids, row_start, row_end, seed,
    q_length, k_length, bias_b, bias_h, bias_q, mask_b, mask_h, mask_q, batches, batch_step, head_step, q_step, k_step,
    d_bias_b, d_bias_h, d_bias_q,
    d_bias,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    PACKED: tl.constexpr, SEGMENTS: tl.constexpr, BIAS_Q: tl.constexpr, BIAS_UNIT: tl.constexpr, MASK: tl.constexpr,
    MASK_UNIT: tl.constexpr, DROP: tl.constexpr,
    THRESHOLD: tl.constexpr, PRECISION: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one tile of the bias, summed over everything that the bias was broadcast over.

    A program starts with a query block, a key block and a head, and goes on by the ``*_step`` over whatever has the
    same place in ``d_bias``: other batches, heads, and blocks along an axis of size 1.
    """
    bias_q, mask_q = multiple(bias_q, BIAS_UNIT), multiple(mask_q, MASK_UNIT)
    q_start = tl.program_id(0) % q_step
    k_start, row = tl.program_id(0) // q_step % k_step, tl.program_id(0) // q_step // k_step
    batch_start, head_start = row // head_step, row % head_step
    sums = tl.zeros([Q_BLOCK, K_BLOCK], tl.float32)
    for batch in range(batch_start, batches, batch_step):
        for head in range(head_start, HEADS, head_step):
            for i in range(q_start, tl.cdiv(q_length, Q_BLOCK), q_step):
                for j in range(k_start, tl.cdiv(k_length, K_BLOCK), k_step):
                    sums += _tile_slopes(
                        batch, head, i, j, query, key, value, d_out, lse, shifts, bias, mask, q_ids, k_ids, row_start,
                        row_end, seed, q_length, k_length, bias_b, bias_h, bias_q, mask_b, mask_h, mask_q,
                        HEADS, GROUP, DIM, V_DIM, WIDTH, V_WIDTH, SCALE, CAP, BEFORE, AFTER, PACKED, SEGMENTS,
                        BIAS_UNIT, MASK, MASK_UNIT, DROP, THRESHOLD, PRECISION, Q_BLOCK, K_BLOCK,
                    )  # fmt: skip
    place = d_bias + batch_start.to(tl.int64) * d_bias_b + head_start.to(tl.int64) * d_bias_h
    queries = q_start * Q_BLOCK + tl.arange(0, Q_BLOCK)
    keys = k_start * K_BLOCK + tl.arange(0, K_BLOCK)
    if BIAS_Q and BIAS_UNIT > 0:
        at = place + queries.to(tl.int64)[:, None] * d_bias_q + keys[None, :]
        tl.store(at, sums, mask=(queries < q_length)[:, None] & (keys < k_length)[None, :])
    elif BIAS_UNIT > 0:
        tl.store(place + keys, tl.sum(sums, 0), mask=keys < k_length)
    elif BIAS_Q:
        tl.store(place + queries.to(tl.int64) * d_bias_q, tl.sum(sums, 1), mask=queries < q_length)
    else:
        tl.store(place, tl.sum(tl.sum(sums, 1), 0))


@triton.jit
def _tile_slopes(
    batch, head, i, j, query, key, value, d_out, lse, shifts, bias, mask, q_ids, k_ids, row_start, row_end, seed,
    q_length, k_length, bias_b, bias_h, bias_q, mask_b, mask_h, mask_q,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    PACKED: tl.constexpr, SEGMENTS: tl.constexpr, BIAS_UNIT: tl.constexpr, MASK: tl.constexpr, MASK_UNIT: tl.constexpr,
    DROP: tl.constexpr, THRESHOLD: tl.constexpr,
    PRECISION: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of the logits of one tile, wherever it lies."""
    batch64, head64 = tl.cast(batch, tl.int64), tl.cast(head, tl.int64)
    row64 = batch64 * HEADS + head64
    KV_HEADS: tl.constexpr = HEADS // GROUP
    kv_head = head // GROUP
    q_first, k_first = i * Q_BLOCK, j * K_BLOCK
    queries, keys = q_first + tl.arange(0, Q_BLOCK), k_first + tl.arange(0, K_BLOCK)
    real, there = queries < q_length, keys < k_length
    q_base = query + batch64 * q_length * (HEADS * DIM) + head * DIM
    d_base = d_out + batch64 * q_length * (HEADS * V_DIM) + head * V_DIM
    k_base = key + batch64 * k_length * (KV_HEADS * DIM) + kv_head * DIM
    v_base = value + batch64 * k_length * (KV_HEADS * V_DIM) + kv_head * V_DIM
    q = load_rows(q_base, q_first, q_length, HEADS * DIM, Q_BLOCK, DIM, WIDTH, True)
    d = load_rows(d_base, q_first, q_length, HEADS * V_DIM, Q_BLOCK, V_DIM, V_WIDTH, True)
    k = load_rows(k_base, k_first, k_length, KV_HEADS * DIM, K_BLOCK, DIM, WIDTH, True)
    v = load_rows(v_base, k_first, k_length, KV_HEADS * V_DIM, K_BLOCK, V_DIM, V_WIDTH, True)
    top = tl.load(lse + row64 * q_length + queries, mask=real, other=float("inf"))
    shift = tl.load(shifts + row64 * q_length + queries, mask=real, other=0.0)
    ahead = k_length - q_length
    start, end = queries + (ahead - BEFORE), queries + (ahead + AFTER + 1)
    if PACKED:
        start = tl.load(row_start + queries, mask=real, other=0)
        end = tl.load(row_end + queries, mask=real, other=0)
    ids = queries
    if SEGMENTS:
        ids = tl.load(q_ids + batch64 * q_length + queries, mask=real, other=0)
    state = queries.to(tl.uint32)
    if DROP > 0:
        state = row_state(seed, row64, queries)
    return _slopes(
        q, k, v, d, queries, keys, real, there, top, shift, start, end, ids, k_ids + batch64 * k_length, state,
        bias + multiple(batch64 * bias_b + head64 * bias_h, BIAS_UNIT),
        mask + multiple(batch64 * mask_b + head64 * mask_h, MASK_UNIT), k_length, bias_q, mask_q,
        SCALE, CAP, BEFORE, AFTER, PACKED, SEGMENTS, True, BIAS_UNIT, MASK, MASK_UNIT, DROP, THRESHOLD, True, True,
        False, PRECISION,
    )  # fmt: skip


@triton.jit
def _slopes(
    q, k, v, d, queries, keys, real, there, top, shift, start, end, ids, k_ids, state, bias_base, mask_base, k_length,
    bias_q, mask_q,
    SCALE: tl.constexpr, CAP: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, PACKED: tl.constexpr,
    SEGMENTS: tl.constexpr, BIAS: tl.constexpr, BIAS_UNIT: tl.constexpr, MASK: tl.constexpr, MASK_UNIT: tl.constexpr,
    DROP: tl.constexpr, THRESHOLD: tl.constexpr, EDGE: tl.constexpr, OF_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of the logits of a tile (queries, keys), before the soft cap, or behind it ``OF_BIAS``."""
    logits, slope = _logits(
        tl.dot(q, k.T, input_precision=PRECISION), queries, keys, real, there, start, end, ids, k_ids, bias_base,
        mask_base, k_length, bias_q, mask_q, SCALE, CAP, BEFORE, AFTER, PACKED, SEGMENTS, BIAS, BIAS_UNIT, MASK,
        MASK_UNIT, EDGE, False, EVEN_K,
    )  # fmt: skip
    weights = _weights(logits - top[:, None], BIAS)
    d_weights = tl.dot(d, v.T, input_precision=PRECISION)
    if DROP > 0:
        keep = kept(state[:, None], keys[None, :], THRESHOLD)
        d_weights = tl.where(keep, d_weights * (1.0 / (1.0 - DROP)), 0.0)
    slopes = weights * (d_weights - shift[:, None])
    if CAP > 0 and not OF_BIAS:
        slopes *= slope
    return slopes


@triton.jit
def _weights(heights, BIAS: tl.constexpr):
    """Of logits above the log-sum-exp of their row, which none of them is."""
    if BIAS:
        # Beside a huge bias a logit has steps of many powers of 2, and one that was summed up in another order than for
        # `find_tops` may be a step higher.
        heights = tl.minimum(heights, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.exp2(heights)


@triton.jit
def _logits(
    products, rows, columns, row_real, column_real, start, end, ids, other_ids, bias_base, mask_base, k_length,
    bias_q, mask_q,
    SCALE: tl.constexpr, CAP: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, PACKED: tl.constexpr,
    SEGMENTS: tl.constexpr, BIAS: tl.constexpr, BIAS_UNIT: tl.constexpr, MASK: tl.constexpr, MASK_UNIT: tl.constexpr,
    EDGE: tl.constexpr, TURNED: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Logits in units of log2, and what the soft cap bends their slope by.

    ``start`` and ``end`` are the interval of columns that each row meets. Rows are queries, or, ``TURNED``, keys.
    """
    slope = products
    if CAP > 0:
        bent = tanh(products * (SCALE / CAP), CAP)
        slope = 1.0 - bent * bent
        logits = bent * (CAP * LOG2E)
    else:
        logits = products * (SCALE * LOG2E)
    if BIAS:
        if TURNED:
            logits += added(plane(bias_base, columns, rows, column_real, k_length, bias_q, BIAS_UNIT)).T
        else:
            logits += added(plane(bias_base, rows, columns, row_real, k_length, bias_q, BIAS_UNIT))
    if EDGE:
        # What is no query has no weight, by its log-sum-exp; and what is no key, as a row, is not stored.
        seen = tl.full([1, 1], True, tl.int1)
        if not TURNED and not EVEN_K:
            seen = column_real[None, :]
        # Before a row lies what its queries see before them; seen from keys, what they see behind them.
        FROM: tl.constexpr = AFTER if TURNED else BEFORE
        UNTIL: tl.constexpr = BEFORE if TURNED else AFTER
        if PACKED or FROM >= 0:
            seen = seen & (columns[None, :] >= start[:, None])
        if PACKED or UNTIL >= 0:
            seen = seen & (columns[None, :] < end[:, None])
        if SEGMENTS:
            other = tl.load(other_ids + columns, mask=column_real, other=0)
            seen = seen & (ids[:, None] == other[None, :]) & (other > 0)[None, :]
        if MASK:
            if TURNED:
                shown = plane(mask_base, columns, rows, column_real, k_length, mask_q, MASK_UNIT).T
            else:
                shown = plane(mask_base, rows, columns, row_real, k_length, mask_q, MASK_UNIT)
            seen = seen & (shown != 0)
        logits = tl.where(seen, logits, -float("inf"))
    return logits, slope
