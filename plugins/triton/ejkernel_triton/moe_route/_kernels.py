"""Routing in three kernels: the experts of each token, where the tokens of each block begin among those of an expert,
and the order of the tokens.

A token has an expert once, so its place among the tokens of that expert is the number of tokens before it that have it.
The results of a token are stored by the threads that hold the scores of its experts.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

#: Below every number's key: what is chosen, or is not an expert.
TAKEN = tl.constexpr(-2147483648)
#: The largest number of float32, as which inf counts.
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def choose(
    logits, bias, tokens,
    weights, experts, counts, smaller, places,
    EXPERTS: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    SCORE: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr, GROUP_K: tl.constexpr, WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr, RENORMALIZE: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """The weights and the experts of a block of tokens, ``ROWS`` at a time; how many of the block's places each expert
    has, and how many the experts before it have; and the number of each place among those of its expert in the block.

    A group of experts has ``WIDTH`` columns, of which the last ones may not be experts; so have ``HEIGHT`` groups, of
    which the last ones may be none. Without groups there is one.
    """
    column = tl.arange(0, HEIGHT * WIDTH)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    expert = column // WIDTH * SIZE + column % WIDTH
    is_expert = (column % WIDTH < SIZE) & (column // WIDTH < GROUPS)
    count = tl.zeros((HEIGHT * WIDTH,), tl.int32)
    for first in range(0, TOKENS, ROWS):
        token = tl.program_id(0) * TOKENS + first + tl.arange(0, ROWS)
        is_token = token < tokens
        # The compiler does not know that program_id(1) is zero. If it did, it would give four neighbouring experts to a
        # thread for a wider load, and move everything through shared memory before it is stored.
        addresses = logits + token.to(tl.int64)[:, None] * EXPERTS + expert[None, :] + tl.program_id(1)
        x = tl.load(addresses, mask=is_token[:, None] & is_expert[None, :], other=-float("inf")).to(tl.float32)
        x = tl.where(x != x, -float("inf"), tl.minimum(x, LARGEST))
        scores = x
        if SCORE == "softmax":
            scores = _exponentials(x)
            if BIAS or not RENORMALIZE:
                scores = scores / _nonzero(tl.sum(scores, 1))[:, None]
        elif SCORE == "sigmoid":
            scores = tl.sigmoid(x)
        compared = scores
        if BIAS:
            compared += tl.load(bias + expert, mask=is_expert, other=0).to(tl.float32)[None, :]
            compared = tl.where(compared != compared, -float("inf"), compared)
        keys = _keys(compared)
        if GROUPS > 1:
            compared = tl.where(is_expert[None, :], compared, -float("inf"))
            is_in = _is_in_best_groups(compared, GROUPS, GROUP_K, BIAS, ROWS, WIDTH, HEIGHT)
            # Below -inf, which an expert of these groups may have.
            keys = tl.where(is_in, keys, TAKEN + K)
        keys = tl.where(is_expert[None, :], keys, TAKEN)
        for i in tl.static_range(K):
            best = _best(keys, column, HEIGHT * WIDTH)
            keys = tl.where(column[None, :] == best[:, None], TAKEN + i, keys)
        is_chosen = (keys < TAKEN + K) & is_expert[None, :] & is_token[:, None]
        if SCORE == "softmax_after":
            scores = _exponentials(tl.where(is_chosen, scores, -float("inf")))
        if SCORE == "softmax_after" or RENORMALIZE:
            scores = scores / _nonzero(tl.sum(tl.where(is_chosen, scores, 0.0), 1))[:, None]
        chosen = is_chosen.to(tl.int32)
        place = count[None, :] + tl.cumsum(chosen, 0) - chosen
        count += tl.sum(chosen, 0)
        slot = token[:, None] * K + (keys - TAKEN)
        tl.store(weights + slot, scores * FACTOR, mask=is_chosen)
        tl.store(experts + slot, tl.broadcast_to(expert[None, :], (ROWS, HEIGHT * WIDTH)), mask=is_chosen)
        tl.store(places + slot, place, mask=is_chosen)
    own = tl.program_id(0) * EXPERTS + expert
    tl.store(counts + own, count, mask=is_expert)
    tl.store(smaller + own, tl.cumsum(count, 0) - count, mask=is_expert)


@triton.jit
def _exponentials(x):
    """Of the differences from the largest number of each row."""
    peak = tl.max(x, 1)
    return tl.exp(x - tl.where(peak == -float("inf"), 0.0, peak)[:, None])


@triton.jit
def _keys(x):
    """Integers in the order of these numbers, none of which is NaN. Zeros of both signs are equal."""
    return _in_order((x + 0.0).to(tl.int32, bitcast=True))


@triton.jit
def _number(key):
    """The number of a key."""
    return _in_order(key).to(tl.float32, bitcast=True)


@triton.jit
def _in_order(bits):
    """The bits of a number as an integer that is compared as the number is, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _best(keys, place, WIDTH: tl.constexpr):
    """The place of the largest key of each row, the first of equal ones."""
    largest = tl.max(keys, 1)
    return tl.min(tl.where(keys == largest[:, None], place[None, :], WIDTH), 1)


@triton.jit
def _nonzero(total):
    return tl.where(total == 0, 1.0, total)


@triton.jit
def _is_in_best_groups(
    scores, GROUPS: tl.constexpr, GROUP_K: tl.constexpr, SUM_OF_TWO: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH: tl.constexpr, HEIGHT: tl.constexpr,
):  # fmt: skip
    """Whether an expert is in one of the best groups. The sum of two scores is -inf only if both are."""
    place = tl.arange(0, WIDTH)
    keys = _keys(tl.reshape(scores, (TOKENS * HEIGHT, WIDTH)))
    group_scores = _number(tl.max(keys, 1))
    if SUM_OF_TWO and WIDTH > 1:
        rest = tl.where(place[None, :] == _best(keys, place, WIDTH)[:, None], TAKEN, keys)
        both = group_scores + tl.maximum(_number(tl.max(rest, 1)), -LARGEST)
        group_scores = tl.where(group_scores == -float("inf"), group_scores, tl.maximum(both, -LARGEST))
    group = tl.arange(0, HEIGHT)
    keys = tl.where((group < GROUPS)[None, :], _keys(tl.reshape(group_scores, (TOKENS, HEIGHT))), TAKEN)
    for _ in tl.static_range(GROUP_K):
        keys = tl.where(group[None, :] == _best(keys, group, HEIGHT)[:, None], TAKEN, keys)
    is_chosen = tl.reshape((keys == TAKEN).to(tl.int32), (TOKENS * HEIGHT, 1))
    return tl.reshape(tl.broadcast_to(is_chosen, (TOKENS * HEIGHT, WIDTH)), (TOKENS, HEIGHT * WIDTH)) != 0


@triton.jit
def place_blocks(
    counts, smaller, blocks,
    starts, firsts, sizes,
    EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """How many places each expert has before each block, how many the experts before it have, and how many it has."""
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    first = tl.zeros((COLUMNS,), tl.int32)
    for row in range(0, blocks, ROWS):
        block = row + tl.arange(0, ROWS)
        mask = (block < blocks)[:, None] & (expert < EXPERTS)[None, :]
        places = block[:, None] * EXPERTS + expert[None, :]
        own = tl.load(counts + places, mask=mask, other=0)
        first += tl.sum(tl.load(smaller + places, mask=mask, other=0), 0)
        tl.store(starts + places, total[None, :] + tl.cumsum(own, 0) - own, mask=mask)
        total += tl.sum(own, 0)
    tl.store(firsts + expert, first, mask=expert < EXPERTS)
    tl.store(sizes + expert, total, mask=expert < EXPERTS)


@triton.jit
def order(
    experts, places, starts, firsts, slots,
    token_order,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The places in the order of the experts; a block of tokens has ``BLOCK`` of them."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    mask = slot < slots
    expert = tl.load(experts + slot, mask=mask, other=0)
    place = tl.load(places + slot, mask=mask, other=0) + tl.load(firsts + expert, mask=mask, other=0)
    place += tl.load(starts + slot // BLOCK * EXPERTS + expert, mask=mask, other=0)
    tl.store(token_order + place, slot, mask=mask)
