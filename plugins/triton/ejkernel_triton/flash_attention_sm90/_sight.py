"""Which blocks each tile sees, found before the kernels run: these only read four numbers a tile."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_triton.flash_attention._problem import Arguments, blocks, extremes, intervals, sides

#: How many blocks each tile sees, at most: known while tracing, or an array where sequences are packed.
Steps = tuple[int, ...] | jax.Array


def of_queries(a: Arguments, q_block: int, k_block: int) -> tuple[jax.Array, Steps]:
    """(batch or 1, blocks of queries, 4): the first block of keys that it sees and the end of them, and between these
    where the blocks of which it sees all begin and end. In that order: first, whole, end of whole, end. One that sees
    nothing is given what lies behind the last block, to be masked. And how many blocks that makes, segments aside.
    """
    before, after = sides(a)
    found, steps = _sight(a, ("query", "q_segment_ids"), ("key", "kv_segment_ids"), 0, before, after, q_block, k_block)
    behind = blocks(a["key"].shape[1], k_block)
    found = jnp.where(found[..., :1] < found[..., 3:], found, jnp.asarray([behind, behind, behind, behind + 1]))
    return found, steps


def of_keys(a: Arguments, k_block: int, q_block: int) -> tuple[jax.Array, Steps]:
    """The same for blocks of keys and the queries that see them, which may be none."""
    before, after = sides(a)
    return _sight(a, ("key", "kv_segment_ids"), ("query", "q_segment_ids"), 2, after, before, k_block, q_block)


def _sight(
    a: Arguments,
    own: tuple[str, str],
    others: tuple[str, str],
    of_intervals: int,
    before: int,
    after: int,
    own_block: int,
    other_block: int,
) -> tuple[jax.Array, Steps]:
    length, other_length = a[own[0]].shape[1], a[others[0]].shape[1]
    if a["cum_seqlens_q"] is not None:
        start, end = intervals(a)[of_intervals : of_intervals + 2]
    else:
        # Without sequences it is known while tracing. The last query stands at the last key.
        place = np.arange(length) + (other_length - length)
        start = place - before if before >= 0 else np.zeros(length, int)
        end = place + after + 1 if after >= 0 else np.full(length, other_length)
    found = _from_intervals(start, end, own_block, other_length, other_block)
    steps = found[:, 3] - found[:, 0]
    found = found[None]
    if a["q_segment_ids"] is not None:
        found = _within_segments(found, a[own[1]], a[others[1]], own_block, other_block)
    return jnp.asarray(found, jnp.int32), tuple(steps.tolist()) if isinstance(steps, np.ndarray) else steps


def _from_intervals(start: Any, end: Any, block: int, other_length: int, other_block: int) -> Any:
    """From what each token sees."""
    xp: Any = np if isinstance(start, np.ndarray) else jnp
    (length,) = start.shape
    count = blocks(length, block)
    real = np.arange(count * block).reshape(count, block) < length
    start, end = (xp.pad(x, (0, count * block - length)).reshape(count, block) for x in (start, end))
    start, end = xp.maximum(start, 0), xp.minimum(end, other_length)
    sees = real & (start < end)
    first = xp.where(sees, start, other_length).min(1) // other_block
    last = xp.maximum(-(-xp.where(sees, end, 0).max(1) // other_block), first)
    whole = xp.clip(-(-xp.where(real, start, 0).max(1) // other_block), first, last)
    whole_end = xp.clip(xp.where(real, end, other_length).min(1) // other_block, whole, last)
    # Rows that are missing in a last block see nothing.
    whole_end = xp.where(real.all(1), whole_end, whole)
    return xp.stack([first, whole, whole_end, last], 1)


def _within_segments(found: Any, ids: jax.Array, other_ids: jax.Array, block: int, other_block: int) -> jax.Array:
    """Nothing but what may share a segment, by the lowest and the highest id of a block; whole is what has but one."""
    low, high, least = (x[:, :, None] for x in jnp.moveaxis(extremes(ids, block), 1, 0))
    other_low, other_high, other_least = (x[:, None] for x in jnp.moveaxis(extremes(other_ids, other_block), 1, 0))
    meet = (low <= other_high) & (other_low <= high)
    one = (least == high) & (high > 0) & (other_least == high) & (other_high == high)
    count = meet.shape[2]
    at = np.arange(count)
    first = jnp.maximum(jnp.where(meet, at, count).min(2), found[..., 0])
    last = jnp.maximum(jnp.minimum(jnp.where(meet, at + 1, 0).max(2), found[..., 3]), first)
    whole = jnp.where(one, at, count).min(2)
    whole_end = jnp.where((at > whole[:, :, None]) & ~one, at, count).min(2)
    whole = jnp.clip(jnp.maximum(whole, found[..., 1]), first, last)
    whole_end = jnp.clip(jnp.minimum(whole_end, found[..., 2]), whole, last)
    return jnp.stack([first, whole, whole_end, last], 2)
