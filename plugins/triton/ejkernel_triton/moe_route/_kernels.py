"""Routing in three kernels: the experts of each token, where the tokens of each block begin among those of an expert,
and the order of the tokens.

A token has an expert once, so its place among the tokens of that expert is the number of tokens before it that have it.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Below every number's key: what is chosen, or is no expert.
TAKEN = tl.constexpr(-2147483648)


@triton.jit
def choose(
    logits, bias, tokens,
    weights, experts, counts,
    EXPERTS: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr, SCORE: tl.constexpr,
    BIAS: tl.constexpr, GROUPS: tl.constexpr, GROUP_K: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr,
    RENORMALIZE: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """The weights and the experts of a block of tokens, and how many of them each expert has.

    A group of experts has ``WIDTH`` columns, of which the last ones may be no experts; so have ``HEIGHT`` groups, of
    which the last ones may be none. Without groups there is one.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, HEIGHT * WIDTH)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    expert = column // WIDTH * SIZE + column % WIDTH
    is_token, is_expert = token < tokens, (column % WIDTH < SIZE) & (column // WIDTH < GROUPS)
    places = token.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    x = tl.load(logits + places, mask=is_token[:, None] & is_expert[None, :], other=-float("inf")).to(tl.float32)
    x = tl.where(x != x, -float("inf"), x)
    scores = x
    if SCORE == "softmax":
        peak = tl.max(x, 1)
        scores = tl.exp(x - tl.where(peak == -float("inf"), 0.0, peak)[:, None])
        scores = scores / _nonzero(tl.sum(scores, 1))[:, None]
    elif SCORE == "sigmoid":
        scores = tl.sigmoid(x)
    compared = scores
    if BIAS:
        compared += tl.load(bias + expert, mask=is_expert, other=0).to(tl.float32)[None, :]
        compared = tl.where(compared != compared, -float("inf"), compared)
    compared = tl.where(is_expert[None, :], compared, -float("inf"))
    if GROUPS > 1:
        compared = _of_best_groups(compared, GROUPS, GROUP_K, BIAS, TOKENS, WIDTH, HEIGHT)
    keys = tl.where(is_expert[None, :], _keys(compared), TAKEN)
    slot = tl.arange(0, SLOTS)
    own_weights = tl.zeros((TOKENS, SLOTS), tl.float32)
    own_experts = tl.zeros((TOKENS, SLOTS), tl.int32)
    for i in tl.static_range(K):
        best = _best(keys, column, HEIGHT * WIDTH)
        is_best = column[None, :] == best[:, None]
        weight = tl.sum(tl.where(is_best, scores, 0.0), 1)
        own_weights = tl.where(slot[None, :] == i, weight[:, None], own_weights)
        best_expert = best // WIDTH * SIZE + best % WIDTH
        own_experts = tl.where(slot[None, :] == i, best_expert[:, None], own_experts)
        keys = tl.where(is_best, TAKEN, keys)
    is_slot = slot < K
    if SCORE == "softmax_after":
        own_weights = tl.where(is_slot[None, :], own_weights, -float("inf"))
        peak = tl.max(own_weights, 1)
        own_weights = tl.exp(own_weights - tl.where(peak == -float("inf"), 0.0, peak)[:, None])
    if SCORE == "softmax_after" or RENORMALIZE:
        own_weights = own_weights / _nonzero(tl.sum(own_weights, 1))[:, None]
    mask = is_token[:, None] & is_slot[None, :]
    places = token[:, None] * K + slot[None, :]
    tl.store(weights + places, own_weights * FACTOR, mask=mask)
    tl.store(experts + places, own_experts, mask=mask)
    chosen = ((keys == TAKEN) & is_expert[None, :] & is_token[:, None]).to(tl.int32)
    tl.store(counts + tl.program_id(0) * EXPERTS + expert, tl.sum(chosen, 0), mask=is_expert)


@triton.jit
def _keys(x):
    """Integers in the order of these numbers, which are no NaN. Zeros of both signs are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _best(keys, place, WIDTH: tl.constexpr):
    """The place of the largest key of each row, the first of equal ones."""
    largest = tl.max(keys, 1)
    return tl.min(tl.where(keys == largest[:, None], place[None, :], WIDTH), 1)


@triton.jit
def _nonzero(total):
    return tl.where(total == 0, 1.0, total)


@triton.jit
def _of_best_groups(
    scores, GROUPS: tl.constexpr, GROUP_K: tl.constexpr, SUM_OF_TWO: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    """The scores, with -inf outside of the best groups."""
    place = tl.arange(0, WIDTH)
    by_group = tl.reshape(scores, (TOKENS * HEIGHT, WIDTH))
    best = _best(_keys(by_group), place, WIDTH)
    group_scores = tl.max(by_group, 1)
    if SUM_OF_TWO and WIDTH > 1:
        rest = tl.where(place[None, :] == best[:, None], -float("inf"), by_group)
        group_scores += tl.max(rest, 1)
    group = tl.arange(0, HEIGHT)
    keys = tl.where((group < GROUPS)[None, :], _keys(tl.reshape(group_scores, (TOKENS, HEIGHT))), TAKEN)
    for _ in tl.static_range(GROUP_K):
        keys = tl.where(group[None, :] == _best(keys, group, HEIGHT)[:, None], TAKEN, keys)
    is_chosen = tl.reshape((keys == TAKEN).to(tl.int32), (TOKENS * HEIGHT, 1)) != 0
    return tl.reshape(tl.where(is_chosen, by_group, -float("inf")), (TOKENS, HEIGHT * WIDTH))


@triton.jit
def place_blocks(counts, blocks, starts, sizes, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """How many tokens before each block an expert has, and how many it has in all."""
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    for first in range(0, blocks, ROWS):
        block = first + tl.arange(0, ROWS)
        mask = (block < blocks)[:, None] & (expert < EXPERTS)[None, :]
        places = block[:, None] * EXPERTS + expert[None, :]
        own = tl.load(counts + places, mask=mask, other=0)
        tl.store(starts + places, total[None, :] + tl.cumsum(own, 0) - own, mask=mask)
        total += tl.sum(own, 0)
    tl.store(sizes + expert, total, mask=expert < EXPERTS)


@triton.jit
def order(
    experts, starts, sizes, tokens,
    token_order,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The places of a block of tokens in the order of the experts."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, WIDTH)
    is_token, is_expert = token < tokens, expert < EXPERTS
    size = tl.load(sizes + expert, mask=is_expert, other=0)
    start = tl.cumsum(size, 0) - size + tl.load(starts + tl.program_id(0) * EXPERTS + expert, mask=is_expert, other=0)
    has = tl.zeros((TOKENS, WIDTH), tl.int32)
    for i in tl.static_range(K):
        own = tl.load(experts + token * K + i, mask=is_token, other=-1)
        has += (own[:, None] == expert[None, :]).to(tl.int32)
    places = start[None, :] + tl.cumsum(has, 0) - has
    for i in tl.static_range(K):
        own = tl.load(experts + token * K + i, mask=is_token, other=-1)
        place = tl.sum(tl.where(own[:, None] == expert[None, :], places, 0), 1)
        tl.store(token_order + place, token * K + i, mask=is_token)
