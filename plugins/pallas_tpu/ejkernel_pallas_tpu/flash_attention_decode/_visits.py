"""The visits of a call: which blocks of keys are fetched, for which batch entry, one after another.

A grid with a step for each block of each cache would take time for blocks that hold no key, and batch entries have
lengths of their own. So each visit is a word in scalar memory, made by XLA of the lengths and positions, and there are
as many steps as visits. With two splits, each of them has half of the blocks that are seen, of every batch entry.
"""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Invocation
from ejkernel_ops.flash_attention.geometry import interval_map
from ejkernel_pallas_tpu.flash_attention._problem import Problem
from ejkernel_pallas_tpu.flash_attention._steps import FIRST, FULL, LAST, VISIBLE
from ejkernel_pallas_tpu.flash_attention_decode._tuning import FLAG_BITS, block_bits

#: Behind every word.
NO_VISIT = np.int32(2**31 - 1)


@attrs.frozen(eq=False)
class Visits:
    """The visits in order, and what is known about all of them while tracing."""

    #: (splits * capacity): the word of each visit.
    table: jax.Array
    #: The same: the batch entry and the block that are fetched, those of the last visit that sees a key.
    fetched: jax.Array
    capacity: int
    #: The most visits of a split: a number, or an array of one.
    count: Any
    block_bits: int
    #: Whether tiles need the mask: "never", "always", or "sometimes", where each word says whether its block is full.
    masked: str

    def word(self, table: Any, split: Any, step: Any) -> Any:
        return table[split * self.capacity + step]

    def batch_of(self, word: Any) -> Any:
        return _shift(word, FLAG_BITS + self.block_bits)

    def block_of(self, word: Any) -> Any:
        return _shift(word, FLAG_BITS) & (2**self.block_bits - 1)


def _shift(word: Any, bits: int) -> Any:
    return jax.lax.shift_right_logical(word, jnp.int32(bits))


def visits(inv: Invocation, p: Problem, splits: int) -> Visits:
    """Each block that a query of a batch entry sees, once. An entry without one has a visit that sees nothing."""
    blocks = interval_map(inv, p.q_block, p.k_block)
    visible, full = (jnp.broadcast_to(x[:, 0], (p.batch, p.k_count)) for x in (blocks.visible, blocks.full))
    tables, counts = zip(*(_split(visible, full, split, splits) for split in range(splits)), strict=True)
    table = jnp.concatenate([_padded(words, count) for words, count in zip(tables, counts, strict=True)])
    return Visits(
        table=table,
        fetched=jnp.concatenate([_fetched(words) for words in table.reshape(splits, -1)]),
        capacity=p.batch * p.k_count,
        count=_static_count(blocks.visible, p.batch, splits) or jnp.max(jnp.stack(counts)),
        block_bits=block_bits(p.k_count),
        masked=_masked(blocks),
    )


def _static_count(visible: Any, batch: int, splits: int) -> int | None:
    """The most visits of a split, if it is known while tracing: then all batch entries are alike."""
    if not isinstance(visible, np.ndarray):
        return None
    return batch * max(-(-int(visible.sum()) // splits), 1)


def _masked(blocks: Any) -> str:
    if not isinstance(blocks.visible, np.ndarray):
        return "sometimes"
    full = blocks.full[blocks.visible]
    return "never" if full.all() else "sometimes" if full.any() else "always"


def _split(visible: jax.Array, full: jax.Array, split: int, splits: int) -> tuple[jax.Array, jax.Array]:
    """The words of a split in order, and how many they are."""
    batch, blocks = visible.shape
    rank, total = jnp.cumsum(visible, 1) - 1, visible.sum(1, keepdims=True)
    first, end = (-(-total * number // splits) for number in (split, split + 1))
    is_own = visible & (rank >= first) & (rank < end)
    block = np.arange(blocks, dtype=np.int32)[None]
    is_idle = (first >= end) & (block == 0)
    flags = jnp.where(is_own, VISIBLE + FULL * full, 0)
    flags = flags + FIRST * (is_idle | (rank == first)) + LAST * (is_idle | (rank == end - 1))
    place = (np.arange(batch, dtype=np.int32)[:, None] << block_bits(blocks)) + block
    words = (place << FLAG_BITS) + flags.astype(jnp.int32)
    is_visit = is_own | is_idle
    return jnp.sort(jnp.where(is_visit, words, NO_VISIT), axis=None), is_visit.sum()


def _padded(words: jax.Array, count: jax.Array) -> jax.Array:
    """With words behind the last visit that do nothing: another split may have more visits."""
    last = jnp.max(jnp.where(words == NO_VISIT, 0, words))
    return jnp.where(words == NO_VISIT, (last >> FLAG_BITS) << FLAG_BITS, words)


def _fetched(words: jax.Array) -> jax.Array:
    """A visit that sees nothing fetches what the one before it has fetched, or else what the next one will."""
    is_visible = (words & VISIBLE) != 0
    before = jax.lax.cummax(jnp.where(is_visible, words, -1))
    following = jnp.min(jnp.where(is_visible, words, NO_VISIT))
    return jnp.where(before >= 0, before, jnp.where(following == NO_VISIT, 0, following))
