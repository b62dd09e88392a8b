"""The steps of a pass: for each outer block, which stays, the inner blocks that are fetched for it, one after another.

Outer blocks are those of queries, and inner blocks those of keys, or the reverse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ejkernel_ops.flash_attention.geometry import BlockMap, interval_map, mask_visible, segment_map
from ejkernel_pallas_tpu.flash_attention._problem import Arguments, Problem

#: A word of a step has the outer block in its highest 14 bits, the inner block in the next 14, and these flags: the
#: first and the last step of an outer block, a pair that is visible, a pair that is full.
FIRST, LAST, VISIBLE, FULL = 1, 2, 4, 8
MOST_BLOCKS = 2**14


@attrs.frozen(eq=False)
class Steps:
    """The steps of a pass in order, a word for each, and what is known about all of them while tracing."""

    #: (rows * count): one row for each batch entry, or one for all.
    table: jax.Array
    rows: int
    count: int
    #: Whether tiles need the mask: "never", "always", or "sometimes", where each word says whether its pair is full.
    masked: str

    def word(self, table: Any, row: Any, step: Any) -> Any:
        return table[(row if self.rows > 1 else 0) * self.count + step]


def outer_block(word: Any) -> Any:
    return jax.lax.shift_right_logical(word, jnp.int32(18))


def inner_block(word: Any) -> Any:
    """The block that is fetched. A step whose pair is not visible repeats the last one, so that nothing is fetched."""
    return jax.lax.shift_right_logical(word, jnp.int32(4)) & (MOST_BLOCKS - 1)


def is_set(word: Any, flag: int) -> Any:
    return (word & flag) != 0


def run_step(steps: Steps, word: Any, tile: Callable[[Any, bool], None]) -> None:
    """Run ``tile(inner block, masked)`` if the step's pair is visible; ``masked`` is False where it is full."""
    inner, is_visible = inner_block(word), is_set(word, VISIBLE)
    if steps.masked != "sometimes":
        pl.when(is_visible)(lambda: tile(inner, steps.masked == "always"))
        return
    is_full = is_set(word, FULL)
    pl.when(jnp.logical_and(is_visible, is_full))(lambda: tile(inner, False))
    pl.when(jnp.logical_and(is_visible, jnp.logical_not(is_full)))(lambda: tile(inner, True))


@attrs.frozen(eq=False)
class PairTable:
    """A word for every pair of a query block and a key block: whether it is visible, in the lowest bit, and above it
    which key block to fetch for it.
    """

    table: jax.Array
    rows: int
    counts: tuple[int, int]

    def word(self, table: Any, row: Any, i: Any, j: Any) -> Any:
        return table[((row if self.rows > 1 else 0) * self.counts[0] + i) * self.counts[1] + j]


@attrs.frozen(eq=False)
class Pairs:
    """Which blocks of queries and keys see each other, and what is known about it while tracing."""

    blocks: BlockMap
    #: Where a pair may be visible, whatever the values are.
    bound: np.ndarray
    is_never_full: bool

    def query_steps(self) -> Steps:
        """With blocks of queries outside."""
        return _steps(self.blocks, self.bound, self.is_never_full)

    def key_steps(self) -> Steps:
        """With blocks of keys outside."""
        return _steps(self.blocks.transpose(), self.bound.swapaxes(1, 2), self.is_never_full)

    def table(self) -> PairTable:
        """Of all pairs. For one that is not visible, the key block of the last visible one before it in its row is
        fetched, or else that of the first behind it: blocks that are not needed cause no traffic.
        """
        visible = jnp.asarray(self.blocks.visible)
        rows, *counts = visible.shape
        last = jax.lax.cummax(jnp.where(visible, np.arange(counts[1]), -1), axis=2)
        nearest = jnp.where(last < 0, visible.argmax(2)[:, :, None], last)
        return PairTable((nearest * 2 + visible).astype(jnp.int32).reshape(-1), rows, (counts[0], counts[1]))


def pairs(a: Arguments, p: Problem) -> Pairs:
    """By everything that hides keys from queries: intervals, segments and a mask."""
    blocks = interval_map(a, p.q_block, p.k_block)
    is_static = isinstance(blocks.visible, np.ndarray)
    bound = blocks.visible if is_static else np.ones(blocks.visible.shape, bool)
    if p.segments:
        blocks &= segment_map(a["q_segment_ids"], a["kv_segment_ids"], p.q_block, p.k_block)
    if p.mask:
        visible = blocks.visible & mask_visible(a["attention_mask"], p.q_block, p.k_block)
        blocks = BlockMap(visible, jnp.zeros_like(visible))
    return Pairs(blocks, np.broadcast_to(bound, blocks.visible.shape), p.mask is not None)


def _steps(blocks: BlockMap, bound: np.ndarray, is_never_full: bool) -> Steps:
    """As many steps for each outer block as it may need, and one where it sees nothing, which writes its output."""
    visible, full = blocks.visible, blocks.full
    is_static = isinstance(visible, np.ndarray) and isinstance(full, np.ndarray)
    xp: Any = np if is_static else jnp
    lengths = np.maximum(bound.sum(2).max(0), 1)
    outer = np.repeat(np.arange(len(lengths)), lengths)
    step = np.concatenate([np.arange(length) for length in lengths])
    count = visible.sum(2)[:, outer]
    order = xp.argsort(~visible, axis=2, stable=True)
    inner = order[:, outer, :]
    inner = xp.take_along_axis(inner, xp.clip(step, 0, xp.maximum(count - 1, 0))[:, :, None], 2)[:, :, 0]
    is_visible = step < count
    is_full = xp.take_along_axis(full[:, outer, :], inner[:, :, None], 2)[:, :, 0]
    ends = FIRST * (step == 0) + LAST * (step == lengths[outer] - 1)
    # As unsigned numbers, because the outer block may use the highest bit.
    table = (outer << 18).astype(np.uint32) + (inner << 4).astype(np.uint32)
    table = table + (ends + VISIBLE * is_visible + FULL * is_full).astype(np.uint32)
    words = table.view(np.int32) if is_static else jax.lax.bitcast_convert_type(table, jnp.int32)
    masked = "always" if is_never_full else "sometimes"
    if is_static:
        masked = "never" if is_full[is_visible].all() else "sometimes" if is_full.any() else "always"
    return Steps(jnp.asarray(words).reshape(-1), len(visible), len(outer), masked)
