"""The forward pass: one program a block of queries of one head, and a loop over the keys that the block can see."""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel_triton.flash_attention._tile import (
    LN2,
    LOG2E,
    LOWEST,
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
def attend(
    query, key, value, bias, mask, q_ids, k_ids, k_extremes, row_start, row_end, sinks, seed,
    q_length, k_length, bias_b, bias_h, bias_q, mask_b, mask_h, mask_q, k_blocks,
    out, lse,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    PACKED: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr, BIAS_UNIT: tl.constexpr, MASK: tl.constexpr,
    MASK_UNIT: tl.constexpr, SINKS: tl.constexpr, SINK_WIDTH: tl.constexpr, DROP: tl.constexpr,
    THRESHOLD: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, NARROW: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """(batch, length, heads, dim) in and out; the log-sum-exp is (batch, heads, length)."""
    bias_q, mask_q = multiple(bias_q, BIAS_UNIT), multiple(mask_q, MASK_UNIT)
    # One axis for all programs, since the others end at 65,535. The last block of queries sees most under a causal
    # mask: the longest work starts first.
    blocks = tl.cdiv(q_length, Q_BLOCK)
    row, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
    batch, head = row // HEADS, row % HEADS
    kv_head = head // GROUP
    batch64 = batch.to(tl.int64)
    q_first = block * Q_BLOCK
    queries = q_first + tl.arange(0, Q_BLOCK)
    real = queries < q_length
    q_base = query + batch64 * q_length * (HEADS * DIM) + head * DIM
    k_base = key + batch64 * k_length * (HEADS // GROUP * DIM) + kv_head * DIM
    v_base = value + batch64 * k_length * (HEADS // GROUP * V_DIM) + kv_head * V_DIM
    q = load_rows(q_base, q_first, q_length, HEADS * DIM, Q_BLOCK, DIM, WIDTH, not EVEN_Q)

    start, end, ids, first, whole, whole_end, last = in_sight(
        q_first, queries, real, row_start, row_end, q_ids + batch64 * q_length, k_extremes + batch64 * 3 * k_blocks,
        q_length, k_length, k_blocks, BEFORE, AFTER, PACKED, SEGMENTS, MASK, Q_BLOCK, K_BLOCK,
    )  # fmt: skip

    top, total = before_keys(sinks, head, SINKS, SINK_WIDTH, Q_BLOCK)
    sums = tl.zeros([Q_BLOCK, V_WIDTH], tl.float32)
    state = queries.to(tl.uint32)
    if DROP > 0:
        state = row_state(seed, row, queries)
    bias_base = bias + multiple(batch64 * bias_b + head.to(tl.int64) * bias_h, BIAS_UNIT)
    mask_base = mask + multiple(batch64 * mask_b + head.to(tl.int64) * mask_h, MASK_UNIT)
    k_ids += batch64 * k_length

    EDGES: tl.constexpr = PACKED or SEGMENTS or MASK or BEFORE >= 0 or AFTER >= 0 or not EVEN_K
    if NARROW:
        # So few blocks that two loops, each of which has to wait for its first loads, would cost more than a branch.
        for j in range(first, last):
            top, total, sums = _step(
                j, (j < whole) | (j >= whole_end), q, k_base, v_base, bias_base, mask_base, k_ids, queries, real, ids,
                start, end, state, q_length, k_length, bias_q, mask_q, top, total, sums,
                HEADS // GROUP * DIM, HEADS // GROUP * V_DIM, DIM, V_DIM, WIDTH, V_WIDTH, SCALE, CAP, BEFORE, AFTER,
                PACKED, SEGMENTS, BIAS, BIAS_UNIT, MASK, MASK_UNIT, DROP, THRESHOLD, not EVEN_K, EVEN_K, PRECISION,
                K_BLOCK,
            )  # fmt: skip
    else:
        for j in range(whole, whole_end):
            top, total, sums = _step(
                j, False, q, k_base, v_base, bias_base, mask_base, k_ids, queries, real, ids, start, end, state,
                q_length, k_length, bias_q, mask_q, top, total, sums,
                HEADS // GROUP * DIM, HEADS // GROUP * V_DIM, DIM, V_DIM, WIDTH, V_WIDTH, SCALE, CAP, BEFORE, AFTER,
                PACKED, SEGMENTS, BIAS, BIAS_UNIT, MASK, MASK_UNIT, DROP, THRESHOLD, False, EVEN_K, PRECISION, K_BLOCK,
            )  # fmt: skip
        if EDGES:
            for t in range(first, last - (whole_end - whole)):
                top, total, sums = _step(
                    edge(t, whole, whole_end), True, q, k_base, v_base, bias_base, mask_base, k_ids, queries, real, ids,
                    start, end, state, q_length, k_length, bias_q, mask_q, top, total, sums,
                    HEADS // GROUP * DIM, HEADS // GROUP * V_DIM, DIM, V_DIM, WIDTH, V_WIDTH, SCALE, CAP, BEFORE, AFTER,
                    PACKED, SEGMENTS, BIAS, BIAS_UNIT, MASK, MASK_UNIT, DROP, THRESHOLD, True, EVEN_K, PRECISION,
                    K_BLOCK,
                )  # fmt: skip

    # A row that saw nothing has a total of 0: its output is 0, and its log-sum-exp -inf.
    sums *= tl.where(total > 0, 1.0 / ((1.0 - DROP) * total), 0.0)[:, None]
    out_base = out + batch64 * q_length * (HEADS * V_DIM) + head * V_DIM
    store_rows(out_base, q_first, q_length, sums, HEADS * V_DIM, Q_BLOCK, V_DIM, V_WIDTH)
    found = (top + tl.log2(total)) * LN2
    if BIAS:
        found = tl.where(top <= LOWEST / 2, LOWEST, found)  # as low as `added` goes: the lowest number it was given
    found = tl.where(total > 0, found, -float("inf"))
    tl.store(lse + row.to(tl.int64) * q_length + queries, found, mask=real)


@triton.jit
def _step(
    j, hidden, q, k_base, v_base, bias_base, mask_base, k_ids, queries, real, ids, start, end, state, q_length,
    k_length, bias_q, mask_q, top, total, sums,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    PACKED: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr, BIAS_UNIT: tl.constexpr, MASK: tl.constexpr,
    MASK_UNIT: tl.constexpr, DROP: tl.constexpr, THRESHOLD: tl.constexpr, CHECKED: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of keys, of which some may be ``hidden``: known when this is compiled, or when it runs."""
    k_first = j * K_BLOCK
    keys = k_first + tl.arange(0, K_BLOCK)
    k = load_rows(k_base, k_first, k_length, K_STRIDE, K_BLOCK, DIM, WIDTH, CHECKED)
    logits = tl.dot(q, k.T, input_precision=PRECISION)
    # Plain logits are scaled where they are used, in one instruction with the subtraction of the greatest.
    UNIT: tl.constexpr = SCALE * LOG2E if CAP == 0 and not BIAS and SCALE > 1e-30 else 1.0
    if CAP > 0:
        logits = tanh(logits * (SCALE / CAP), CAP) * (CAP * LOG2E)
    elif BIAS or SCALE <= 1e-30:
        logits = logits * (SCALE * LOG2E)
    if BIAS:
        logits += added(plane(bias_base, queries, keys, real, k_length, bias_q, BIAS_UNIT))
    if hidden:
        seen = tl.full([1, 1], True, tl.int1)
        if not EVEN_K:
            seen = (keys < k_length)[None, :]
        if PACKED or BEFORE >= 0:
            seen = seen & (keys[None, :] >= start[:, None])
        if PACKED or AFTER >= 0:
            seen = seen & (keys[None, :] < end[:, None])
        if SEGMENTS:
            other = tl.load(k_ids + keys, mask=keys < k_length, other=0)
            seen = seen & (ids[:, None] == other[None, :]) & (other > 0)[None, :]
        if MASK:
            seen = seen & (plane(mask_base, queries, keys, real, k_length, mask_q, MASK_UNIT) != 0)
        logits = tl.where(seen, logits, -float("inf"))
    new_top = tl.maximum(top, tl.max(logits, 1) * UNIT)
    shrink = tl.exp2(top - new_top)
    weights = tl.exp2(logits * UNIT - new_top[:, None])
    total = total * shrink + tl.sum(weights, 1)
    if DROP > 0:
        weights = tl.where(kept(state[:, None], keys[None, :], THRESHOLD), weights, 0.0)
    v = load_rows(v_base, k_first, k_length, V_STRIDE, K_BLOCK, V_DIM, V_WIDTH, CHECKED)
    sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision=PRECISION)
    return new_top, total, sums
