"""Which blocks meet: for every block that stays, the run of blocks of the other side that is fetched for it."""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops.flash_attention.tokens import tokens
from ejkernel_pallas_tpu.flash_attention._problem import Arguments, Problem

NO_INT = np.iinfo(np.int32).max
#: A step's word: the block that stays in the highest 14 bits, the other in the next 14, and what is to be done.
FIRST, LAST, SEEN, WHOLE = 1, 2, 4, 8
MOST_BLOCKS = 2**14


@attrs.frozen(eq=False)
class Sight:
    """The steps of a pass in order, a word for each, and what is known of all of them while tracing."""

    #: (rows * steps): one row for each batch entry, or one for all.
    table: jax.Array
    rows: int
    steps: int
    #: Whether tiles have to look at masks: "never", "always", or "sometimes", where the step says.
    masked: str

    def word(self, table: Any, row: Any, step: Any) -> Any:
        return table[(row if self.rows > 1 else 0) * self.steps + step]


def staying(word: Any) -> Any:
    """The block that stays, for the steps from FIRST to LAST."""
    return jax.lax.shift_right_logical(word, jnp.int32(18))


def passing(word: Any) -> Any:
    """The block of the other side that goes by; where nothing is SEEN any more, the last one stays."""
    return jax.lax.shift_right_logical(word, jnp.int32(4)) & (MOST_BLOCKS - 1)


def is_set(word: Any, bit: int) -> Any:
    return (word & bit) != 0


@attrs.frozen(eq=False)
class Plane:
    """A word for every pair of a query block and a key block: whether they meet, and which key block is to be there."""

    table: jax.Array
    rows: int
    counts: tuple[int, int]

    def word(self, table: Any, row: Any, i: Any, j: Any) -> Any:
        return table[((row if self.rows > 1 else 0) * self.counts[0] + i) * self.counts[1] + j]


@attrs.frozen(eq=False)
class Meetings:
    """Two maps of (rows, query blocks, key blocks): where anybody may see anything, and where all see all."""

    meets: Any
    whole: Any
    #: The first map without what depends on values: known while tracing.
    bound: np.ndarray
    never_whole: bool

    def from_queries(self) -> Sight:
        return _sight(self.meets, self.whole, self.bound, self.never_whole)

    def from_keys(self) -> Sight:
        meets, whole, bound = (x.swapaxes(1, 2) for x in (self.meets, self.whole, self.bound))
        return _sight(meets, whole, bound, self.never_whole)

    def everywhere(self) -> Plane:
        """Where nobody meets, the last block that somebody met stays, or the first that somebody will."""
        meets = jnp.asarray(self.meets)
        rows, *counts = meets.shape
        last = jax.lax.cummax(jnp.where(meets, np.arange(counts[1]), -1), axis=2)
        nearest = jnp.where(last < 0, meets.argmax(2)[:, :, None], last)
        return Plane((nearest * 2 + meets).astype(jnp.int32).reshape(-1), rows, (counts[0], counts[1]))


def meetings(a: Arguments, p: Problem) -> Meetings:
    """Too many tiles would be slow, too few wrong: where in doubt, a tile meets and is not whole."""
    meets, whole = _by_interval(p, *intervals(a, p))
    bound = meets if isinstance(meets, np.ndarray) else np.ones(meets.shape, bool)
    if p.segments:
        q_low, q_high, q_one = (x[:, :, None] for x in _extremes(a["q_segment_ids"], p.q_count, p.q_block))
        k_low, k_high, k_one = (x[:, None, :] for x in _extremes(a["kv_segment_ids"], p.k_count, p.k_block))
        meets = meets & (q_low <= k_high) & (k_low <= q_high)
        whole = whole & q_one & k_one & (q_high == k_high)
    if p.mask:
        meets = meets & _shown(a["attention_mask"], p)
        whole = jnp.zeros_like(meets)
    return Meetings(meets, whole, np.broadcast_to(bound, meets.shape), p.mask is not None)


def intervals(a: Arguments, p: Problem) -> tuple[Any, Any]:
    """Which keys each query may see by its place, start and end: NumPy arrays, unless sequences are packed."""
    xp: Any = jnp if p.packed else np
    if p.packed:
        where, bounds = tokens(a), a["cum_seqlens_k"]
        ids, place = where.groups[0][0][0], where.q_position[0]
        start, end = bounds[ids - 1], bounds[ids]
        start, end = (jnp.where(ids > 0, x, 0).astype(jnp.int32) for x in (start, end))
    else:
        place = np.arange(p.q_length, dtype=np.int32) + np.int32(p.shift)
        start, end = np.zeros(p.q_length, np.int32), np.full(p.q_length, p.k_length, np.int32)
    if p.before is not None:
        start = xp.maximum(start, place - p.before)
    if p.after is not None:
        end = xp.minimum(end, place + p.after + 1)
    return start, end


def _by_interval(p: Problem, start: Any, end: Any) -> tuple[Any, Any]:
    xp: Any = np if isinstance(start, np.ndarray) else jnp
    missing = p.q_count * p.q_block - p.q_length
    # Queries that only fill the last block up see nothing, and do not keep a tile from being whole.
    seeing = xp.pad(start < end, (0, missing)).reshape(p.q_count, p.q_block)
    real = (np.arange(p.q_count * p.q_block) < p.q_length).reshape(p.q_count, p.q_block)
    start, end = (xp.pad(x, (0, missing)).reshape(p.q_count, p.q_block) for x in (start, end))
    low, high = xp.where(seeing, start, NO_INT).min(1), xp.where(seeing, end, 0).max(1)
    whole_low, whole_high = xp.where(real, start, 0).max(1), xp.where(real, end, NO_INT).min(1)
    at = np.arange(p.k_count, dtype=np.int32) * p.k_block
    meets = (low[:, None] < at + p.k_block) & (high[:, None] > at)
    whole = (whole_low[:, None] <= at) & (whole_high[:, None] >= at + p.k_block) & (at + p.k_block <= p.k_length)
    return meets[None], (meets & whole)[None]


def _extremes(ids: jax.Array, count: int, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The lowest and the highest id of each block, padding aside, and whether there is but one and no padding."""
    batch, length = ids.shape
    cut = jnp.pad(ids, ((0, 0), (0, count * block - length))).reshape(batch, count, block)
    low, high = jnp.where(cut > 0, cut, NO_INT).min(-1), jnp.maximum(cut.max(-1), 0)
    return low, high, (cut.min(-1) == high) & (high > 0)


def _shown(mask: jax.Array, p: Problem) -> jax.Array:
    """The tiles in which a mask shows anything, to any head."""
    mask = mask.any(1)
    for axis, count, block in ((1, p.q_count, p.q_block), (2, p.k_count, p.k_block)):
        if mask.shape[axis] > 1:
            missing = count * block - mask.shape[axis]
            mask = jnp.pad(mask, [(0, missing if other == axis else 0) for other in range(3)])
            mask = mask.reshape(*mask.shape[:axis], count, block, *mask.shape[axis + 1 :]).any(axis + 1)
    return mask


def _sight(meets: Any, whole: Any, bound: np.ndarray, never_whole: bool) -> Sight:
    """As many steps for each block as it may need, and one where it meets nobody: somebody has to write its output."""
    static = isinstance(meets, np.ndarray) and isinstance(whole, np.ndarray)
    xp: Any = np if static else jnp
    lengths = np.maximum(bound.sum(2).max(0), 1)
    block = np.repeat(np.arange(len(lengths)), lengths)
    step = np.concatenate([np.arange(length) for length in lengths])
    count = meets.sum(2)[:, block]
    order = xp.argsort(~meets, axis=2, stable=True)
    other = order[:, block, :]
    other = xp.take_along_axis(other, xp.clip(step, 0, xp.maximum(count - 1, 0))[:, :, None], 2)[:, :, 0]
    seen, clean = step < count, xp.take_along_axis(whole[:, block, :], other[:, :, None], 2)[:, :, 0]
    ends = FIRST * (step == 0) + LAST * (step == lengths[block] - 1)
    # As unsigned numbers, of which the highest block may have the highest bit.
    table = (block << 18).astype(np.uint32) + (other << 4).astype(np.uint32)
    table = table + (ends + SEEN * seen + WHOLE * clean).astype(np.uint32)
    words = table.view(np.int32) if static else jax.lax.bitcast_convert_type(table, jnp.int32)
    masked = "always" if never_whole else "sometimes"
    if static:
        masked = "never" if clean[seen].all() else "sometimes" if clean.any() else "always"
    return Sight(jnp.asarray(words).reshape(-1), len(meets), len(block), masked)
