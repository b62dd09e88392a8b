"""Which blocks each tile sees, four numbers a tile: computed before the kernels run, which only read them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops.flash_attention.geometry import (
    Arguments,
    BlockMap,
    Interval,
    block_count,
    key_intervals,
    position_map,
    query_intervals,
    segment_map,
    spans,
)
from ejkernel_ops.flash_attention.positions import has_positions

#: How many blocks each tile sees, at most: known while tracing, or an array where sequences are packed or a call has
#: positions.
Steps = tuple[int, ...] | jax.Array
#: The segments of own and other tokens.
Ids = tuple[jax.Array, jax.Array] | None


def key_ranges(a: Arguments, q_block: int, k_block: int) -> tuple[jax.Array, Steps]:
    """For blocks of queries, (batch or 1, blocks, 4): the ranges of blocks of keys, as in `BlockMap.ranges`; and how
    many blocks that makes, segments aside.

    A block that sees nothing has one block behind the last one, which the kernel masks.
    """
    k_length = a["key"].shape[1]
    ids = None if a["q_segment_ids"] is None else (a["q_segment_ids"], a["kv_segment_ids"])
    if has_positions(a):
        ranges, steps = _traced_ranges(position_map(a, q_block, k_block), ids, q_block, k_block)
    else:
        ranges, steps = _ranges(key_intervals(a), ids, q_block, k_length, k_block)
    behind = block_count(k_length, k_block)
    sees = ranges[..., :1] < ranges[..., 3:]
    return jnp.where(sees, ranges, jnp.asarray([behind, behind, behind, behind + 1])), steps


def query_ranges(a: Arguments, k_block: int, q_block: int) -> tuple[jax.Array, Steps]:
    """The same for blocks of keys and the queries that see them, which may be none."""
    ids = None if a["q_segment_ids"] is None else (a["kv_segment_ids"], a["q_segment_ids"])
    if has_positions(a):
        return _traced_ranges(position_map(a, q_block, k_block).transpose(), ids, k_block, q_block)
    return _ranges(query_intervals(a), ids, k_block, a["query"].shape[1], q_block)


def _ranges(interval: Interval, ids: Ids, block: int, other_length: int, other_block: int) -> tuple[jax.Array, Steps]:
    # The kernels mask the tokens that a last block lacks, so that it is never full.
    ranges = spans(interval, block, other_length, is_padding_masked=True).ranges(other_block)
    steps = ranges[:, 3] - ranges[:, 0]
    ranges = ranges[None]
    steps = tuple(steps.tolist()) if isinstance(steps, np.ndarray) else steps
    return _within_segments(ranges, ids, block, other_block), steps


def _traced_ranges(blocks: BlockMap, ids: Ids, block: int, other_block: int) -> tuple[jax.Array, Steps]:
    """The ranges of each batch entry, and the steps of the one that has most."""
    ranges = blocks.ranges()
    return _within_segments(ranges, ids, block, other_block), jnp.max(ranges[..., 3] - ranges[..., 0], 0)


def _within_segments(ranges: Any, ids: Ids, block: int, other_block: int) -> jax.Array:
    if ids is not None:
        ranges = _intersection(ranges, segment_map(*ids, block, other_block).ranges())
    return jnp.asarray(ranges, jnp.int32)


def _intersection(ranges: Any, others: Any) -> jax.Array:
    first = jnp.maximum(ranges[..., 0], others[..., 0])
    end = jnp.maximum(jnp.minimum(ranges[..., 3], others[..., 3]), first)
    full = jnp.clip(jnp.maximum(ranges[..., 1], others[..., 1]), first, end)
    full_end = jnp.clip(jnp.minimum(ranges[..., 2], others[..., 2]), full, end)
    return jnp.stack([first, full, full_end, end], -1)
