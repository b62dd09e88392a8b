"""Device code of both operations: a program copies some tokens, each to its place in the pages.

The pointers to tokens move to the program's first one in 64 bits, and have offsets of 32 bits from there. Places are
anywhere in the pages, so their offsets have 64 bits: a cache may have more than 2 ** 31 entries.

``new_kv_pages`` and the like are for jax-triton 0.3, which passes a result that is an argument a second time. Nothing
uses them.
"""

# Triton's compiler gives the parameters their types.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

# To add it to a float32 and to subtract it again rounds to the nearest whole number, and halves to even.
ROUNDING_NUMBER: tl.constexpr = tl.constexpr(12582912.0)


@triton.jit
def update(
    key, value, slots, first_page, k_scale, v_scale, kv_pages, tokens, count, new_kv_pages,
    FIRST_PAGE: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Keys and values side by side, by head: a program has both of a token, so that it leaves no gaps in memory."""
    place, is_stored = places_of_tokens(slots, first_page, tokens, count, FIRST_PAGE, PAGE_SIZE, TOKENS)
    STRIDE: tl.constexpr = DIM + VALUE_DIM
    store(key, k_scale, kv_pages, tokens, place, is_stored, K_SCALES, HEADS, DIM, STRIDE, TOKENS, WIDTH)
    store(value, v_scale, kv_pages + DIM, tokens, place, is_stored, V_SCALES, HEADS, VALUE_DIM, STRIDE, TOKENS, WIDTH)


@triton.jit
def update_pair(
    key, value, slots, first_page, k_scale, v_scale, key_pages, value_pages, tokens, count,
    new_key_pages, new_value_pages,
    FIRST_PAGE: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Keys and values in arrays of their own."""
    place, is_stored = places_of_tokens(slots, first_page, tokens, count, FIRST_PAGE, PAGE_SIZE, TOKENS)
    store(key, k_scale, key_pages, tokens, place, is_stored, K_SCALES, HEADS, DIM, DIM, TOKENS, WIDTH)
    store(value, v_scale, value_pages, tokens, place, is_stored, V_SCALES, HEADS, VALUE_DIM, VALUE_DIM, TOKENS, WIDTH)


@triton.jit
def places_of_tokens(slots, first_page, tokens, count, FIRST_PAGE: tl.constexpr, PAGE_SIZE: tl.constexpr,
                     TOKENS: tl.constexpr):  # fmt: skip
    """Where each token of the program goes, counted in tokens, and whether it goes anywhere."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    place = slot.to(tl.int64)
    if FIRST_PAGE:
        place += tl.load(first_page).to(tl.int64) * PAGE_SIZE
    return place, (slot >= 0) & (place >= 0) & (place < count)


@triton.jit
def store(source, scale, pages, tokens, place, is_stored, SCALES: tl.constexpr, HEADS: tl.constexpr,
          DIM: tl.constexpr, STRIDE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Copy keys or values. Heads of the pages begin ``STRIDE`` entries apart. A program has ``WIDTH`` entries of a
    token: eight or more that follow one another are of one head, so that a thread moves them at once.
    """
    ENTRIES: tl.constexpr = HEADS * DIM
    entry = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_entry = (entry < ENTRIES)[None, :]
    first, token = tl.program_id(0) * TOKENS, tl.arange(0, TOKENS)
    source += first.to(tl.int64) * ENTRIES
    # Also tokens that are not stored: a load that depends on the slots would wait for theirs.
    is_token = (first + token < tokens)[:, None]
    tile = tl.load(source + token[:, None] * ENTRIES + entry[None, :], mask=is_token & is_entry, other=0.0)
    head = entry // DIM
    if SCALES > 0:
        of_head = tl.load(scale + (head if SCALES > 1 else head * 0), mask=entry < ENTRIES, other=1.0)
        tile = tl.div_rn(tile.to(tl.float32), tl.broadcast_to(of_head[None, :], [TOKENS, WIDTH]))
    offset = place[:, None] * (HEADS * STRIDE) + (head * STRIDE + entry % DIM)[None, :]
    tl.store(pages + offset, converted(tile, pages.dtype.element_ty), mask=is_stored[:, None] & is_entry)


@triton.jit
def converted(tile, dtype: tl.constexpr):
    """In the dtype of the pages. A card's conversion to float8 saturates; that to integers truncates."""
    if dtype == tl.int8:
        tile = tile.to(tl.float32)
        tile = tl.where(tile != tile, 0.0, tl.minimum(tl.maximum(tile, -128.0), 127.0))
        tile = (tile + ROUNDING_NUMBER) - ROUNDING_NUMBER
    elif dtype == tl.float8e4nv:
        tile = tile.to(tl.float32)
    return tile.to(dtype)
