"""Which blocks meet: for every block that stays, the run of blocks of the other side that is fetched for it."""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops.attention.tokens import tokens
from ejkernel_pallas_tpu._problem import Arguments, Problem

NO_INT = np.iinfo(np.int32).max


@attrs.frozen(eq=False)
class Sight:
    """A row of four numbers for every block that stays, and what is known of all of them while tracing."""

    #: (rows, blocks, 4), flat: the first block of the other side, how many, and where among them the run starts and
    #: ends of which every pair sees each other.
    table: jax.Array
    #: 1 where the batch does not matter.
    rows: int
    blocks: int
    #: The most blocks that any block meets: the length of the grid's last axis.
    steps: int
    #: Whether tiles have to look at masks: "never", "always", or "sometimes", where the run of whole blocks says.
    masked: str

    def place(self, table: Any, row: Any, block: Any, step: Any) -> Any:
        """The block of the other side to be there in this step: behind the last one, the last one stays."""
        base = self.base(row, block)
        return table[base] + jnp.clip(step, 0, jnp.maximum(table[base + 1] - 1, 0))

    def base(self, row: Any, block: Any) -> Any:
        return ((row if self.rows > 1 else 0) * self.blocks + block) * 4


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
        turned = (x.swapaxes(1, 2) for x in (self.meets, self.whole, self.bound))
        return _sight(*turned, self.never_whole)


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
    if p.packed:
        where, bounds = tokens(a), a["cum_seqlens_k"]
        ids, place = where.groups[0][0][0], where.q_position[0]
        start, end, xp = bounds[ids - 1], bounds[ids], jnp
        start, end = (jnp.where(ids > 0, x, 0).astype(jnp.int32) for x in (start, end))
    else:
        place, xp = np.arange(p.q_length, dtype=np.int32) + np.int32(p.shift), np
        start, end = np.zeros(p.q_length, np.int32), np.full(p.q_length, p.k_length, np.int32)
    if p.before is not None:
        start = xp.maximum(start, place - p.before)
    if p.after is not None:
        end = xp.minimum(end, place + p.after + 1)
    return start, end


def _by_interval(p: Problem, start: Any, end: Any) -> tuple[Any, Any]:
    xp = np if isinstance(start, np.ndarray) else jnp
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
    static = isinstance(meets, np.ndarray) and isinstance(whole, np.ndarray)
    xp = np if static else jnp
    rows, blocks, count = meets.shape
    index = np.arange(count)
    first, end = meets.argmax(2), count - meets[:, :, ::-1].argmax(2)
    end = xp.where(meets.any(2), end, first)
    whole = whole & meets
    run = xp.where(whole.any(2), whole.argmax(2), first)
    broken = ~whole & (index >= run[:, :, None])
    run_end = xp.where(broken.any(2), broken.argmax(2), count)
    run_end = xp.where(whole.any(2), run_end, run)
    table = xp.stack([first, end - first, run, run_end], 2).astype(np.int32)
    most = table[:, :, 1] if static else _longest(bound)
    masked = "always" if never_whole else "sometimes"
    if static:
        inside = int((table[:, :, 3] - table[:, :, 2]).sum())
        masked = "never" if inside == int(table[:, :, 1].sum()) else "sometimes" if inside else "always"
    return Sight(jnp.asarray(table).reshape(-1), rows, blocks, max(1, int(most.max())), masked)


def _longest(bound: np.ndarray) -> np.ndarray:
    count = bound.shape[2]
    return np.where(bound.any(2), count - bound[:, :, ::-1].argmax(2) - bound.argmax(2), 0)
