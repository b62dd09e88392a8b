"""The keys of one head, out of a block with those of all heads.

A cache is (batch, slots, heads, dim), and the heads of a slot are the sublanes of one register: no copy can fetch one
of them alone. So a block has all heads, as it lies in memory, and is read once. Vector memory is read by words of 32
bits at a stride, and a word of 16-bit numbers has two heads of a slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel_pallas_tpu.launch import Scratch
from ejkernel_pallas_tpu.launch._arrays import LANES
from ejkernel_pallas_tpu.online_softmax.words import has_pairs

#: Heads whose code is written out. More of them are a loop over as many.
UNROLLED = 8


def words(dtype: Any, heads: int, slots: int, dim: int) -> Scratch:
    """Memory for a block in words: (columns, words, lanes). A stride needs rows of exactly as many lanes as a register.

    With one head, the block is read where it is. An odd number of heads of 16 bits is converted to float32.
    """
    if heads == 1:
        return Scratch((1, 8, LANES))
    if has_pairs(dtype, heads):
        return Scratch((-(-dim // LANES), slots * heads // 2, LANES), "uint32")
    return Scratch((-(-dim // LANES), slots * heads, LANES))


def put(block: Any, words: Any, heads: int) -> None:
    """Write a block, (slots * heads, dim) or the same in more axes, into its memory for words."""
    if heads == 1:
        return
    dim, is_paired = block.shape[-1], has_pairs(block.dtype, heads)
    for column, start in enumerate(range(0, dim, LANES)):
        width = min(LANES, dim - start)
        x = block[..., pl.ds(start, width)].reshape(-1, width)
        words[column, :, pl.ds(0, width)] = pltpu.bitcast(x, jnp.uint32) if is_paired else x.astype(jnp.float32)


def take(block: Any, words: Any, heads: int, head: Any, parity: int, dtype: Any) -> Any:
    """(slots, dim) of a head in a dtype. ``parity`` says whether the head is odd."""
    dim = block.shape[-1]
    if heads == 1:
        return block[...].reshape(-1, dim).astype(dtype)
    is_paired = has_pairs(block.dtype, heads)
    stride = heads // 2 if is_paired else heads
    rows = pl.ds(head // 2 if is_paired else head, words.shape[1] // stride, stride=stride)
    columns = [words.at[column][rows, :] for column in range(words.shape[0])]
    x = jnp.concatenate(columns, axis=1) if len(columns) > 1 else columns[0]
    if is_paired:
        # The upper half of a float32 is the bfloat16 that it would be rounded to.
        x = x & jnp.uint32(0xFFFF0000) if parity else x << jnp.uint32(16)
        x = pltpu.bitcast(x, jnp.float32)
    x = x if x.shape[1] == dim else x[:, :dim]
    return x.astype(dtype)


def for_each_head(heads: int, body: Callable[[Any, int], None]) -> None:
    """Run ``body(head, parity)`` for each head."""
    if heads <= UNROLLED:
        for head in range(heads):
            body(head, head % 2)
        return
    # Where a word has two heads, each turn begins with an even one.
    counts = [count for count in range(1, UNROLLED + 1) if heads % count == 0 and (count % 2 == 0 or heads % 2)]
    count = max(counts)

    def turn(number: Any, carry: Any) -> Any:
        for head in range(count):
            body(number * count + head, head % 2)
        return carry

    lax.fori_loop(0, heads // count, turn, 0)
