"""Which blocks of keys a block of queries sees, and the reverse, for kernels that plan their work by it.

There are three forms of it, from fine to coarse. An *interval* is, for each token, the run of tokens of the other side
that its position and its packed sequence allow it to see. A *span* is the same for a block of tokens. A *block map*
says for each pair of blocks whether it is visible, and whether it is full, which means that no score in it is masked.
A block map may have too many visible pairs and too few full ones, never the reverse.

Results are NumPy arrays wherever shapes and options decide them, so that a kernel can plan in Python while it is
traced. Boundaries of packed sequences, segment ids and masks make them JAX arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from .positions import has_positions, is_filled, key_positions
from .tokens import band, tokens

Arguments = Mapping[str, Any]
Interval = tuple[Any, Any]

NO_ID = np.iinfo(np.int32).max


def block_count(length: int, block: int) -> int:
    """How many blocks cover the length: at least one.

    >>> block_count(256, 128), block_count(257, 128), block_count(0, 128)
    (2, 3, 1)
    """
    return max(1, math.ceil(length / block))


def pad_to(x: Any, axis: int, length: int, fill: float | bool = 0) -> Any:
    """Pad an axis at its end.

    >>> pad_to(np.array([[1, 2]]), 1, 4, fill=7)
    array([[1, 2, 7, 7]])
    """
    missing = length - x.shape[axis]
    if not missing:
        return x
    return _array_module(x).pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)], constant_values=fill)


def split_blocks(x: Any, block: int, fill: int | bool = 0) -> Any:
    """(rows, length) as (rows, blocks, block), the last block padded.

    >>> split_blocks(np.array([[1, 2, 3]]), 2)
    array([[[1, 2],
            [3, 0]]])
    """
    rows, length = x.shape
    count = block_count(length, block)
    return pad_to(x, 1, count * block, fill).reshape(rows, count, block)


def key_intervals(arguments: Arguments) -> Interval:
    """For each query, the start and the end of the keys that causality, window and packed sequences let it see.

    They are the same for every batch entry. A query that sees nothing has an end that is not after its start.

    >>> shapes = {name: jax.ShapeDtypeStruct((1, 4, 2, 16), "float32") for name in ("query", "key")}
    >>> absent = dict.fromkeys(["cum_seqlens_q", "q_segment_ids", "q_start", "kv_lengths", "kv_positions"])
    >>> key_intervals({**shapes, **absent, "causal": True, "sliding_window": (1, 0)})
    (array([0, 0, 1, 2], dtype=int32), array([1, 2, 3, 4], dtype=int32))
    """
    coordinates, (left, right) = tokens(arguments), band(arguments["causal"], arguments["sliding_window"])
    position, length = coordinates.q_position[0], arguments["key"].shape[1]
    if arguments["cum_seqlens_q"] is None:
        return _interval(position, length, left, right)
    q_ids = coordinates.groups[0][0][0]
    return _packed_interval(q_ids, position, arguments["cum_seqlens_k"], length, left, right)


def query_intervals(arguments: Arguments) -> Interval:
    """For each key, the start and the end of the queries that may see it."""
    left, right = band(arguments["causal"], arguments["sliding_window"])
    q_length, k_length = arguments["query"].shape[1], arguments["key"].shape[1]
    if arguments["cum_seqlens_q"] is None:
        position = np.arange(k_length, dtype=np.int32) + np.int32(q_length - k_length)
        return _interval(position, q_length, right, left)
    cum_q, cum_k = arguments["cum_seqlens_q"], arguments["cum_seqlens_k"]
    k_ids = tokens(arguments).groups[0][1][0]
    position = jnp.arange(k_length, dtype=jnp.int32) + (cum_q[1:] - cum_k[1:])[k_ids - 1]
    return _packed_interval(k_ids, position, cum_q, q_length, right, left)


def _interval(position: np.ndarray, length: int, left: int | None, right: int | None) -> Interval:
    start, end = np.zeros(len(position), np.int32), np.full(len(position), length, np.int32)
    return _within_band(start, end, position, left, right)


def _packed_interval(
    ids: jax.Array, position: jax.Array, bounds: jax.Array, length: int, left: int | None, right: int | None
) -> Interval:
    # Boundaries beyond the last token are an error that cannot be detected here, but nothing beyond it may be read.
    start, end = _within_band(bounds[ids - 1], jnp.minimum(bounds[ids], length), position, left, right)
    return jnp.where(ids > 0, start, 0).astype(jnp.int32), jnp.where(ids > 0, end, 0).astype(jnp.int32)


def _within_band(start: Any, end: Any, position: Any, left: int | None, right: int | None) -> Interval:
    xp = _array_module(start)
    if left is not None:
        start = xp.maximum(start, position - left)
    if right is not None:
        end = xp.minimum(end, position + right + 1)
    return start, end


@attrs.frozen(eq=False)
class BlockMap:
    """For each pair of blocks, (rows, blocks, blocks of the other side): whether it is visible, and whether full.

    ``rows`` is the batch, or 1 where all batch entries have the same map.
    """

    visible: Any
    full: Any

    def __and__(self, other: BlockMap) -> BlockMap:
        return BlockMap(self.visible & other.visible, self.full & other.full)

    def transpose(self) -> BlockMap:
        """The map of the same pairs, with the blocks of the other side first."""
        return BlockMap(self.visible.swapaxes(1, 2), self.full.swapaxes(1, 2))

    def ranges(self) -> Any:
        """(rows, blocks, 4): for each block, in blocks of the other side, the first visible one, the first full one
        after which no partial one comes until the third number, and the end of the visible ones.

        Between the first number and the last there may be pairs that are not visible. A block that sees nothing has
        the number of blocks four times, and one without full pairs the end three times.

        >>> visible, full = np.array([[0, 1, 1, 1], [0, 0, 0, 0]]) > 0, np.array([[0, 0, 1, 0], [0, 0, 0, 0]]) > 0
        >>> BlockMap(visible[:, None], full[:, None]).ranges().tolist()
        [[[1, 2, 3, 4]], [[4, 4, 4, 4]]]
        """
        xp = _array_module(self.visible, self.full)
        count = self.visible.shape[2]
        index = np.arange(count)[None, None]  # users may forbid rank promotion
        first = xp.where(self.visible, index, count).min(2)
        end = xp.maximum(xp.where(self.visible, index + 1, 0).max(2), first)
        full = xp.where(self.full, index, count).min(2)
        full_end = xp.where((index > full[..., None]) & ~self.full, index, count).min(2)
        full = xp.clip(full, first, end)
        return xp.stack([first, full, xp.clip(full_end, full, end), end], 2)


@attrs.frozen(eq=False)
class Spans:
    """For each block of tokens, in tokens of the other side: some token of the block sees something in ``[start, end)``
    and none sees anything outside; every token sees all of ``[full_start, full_end)``, which may be empty.
    """

    start: Any
    end: Any
    full_start: Any
    full_end: Any

    def ranges(self, other_block: int) -> Any:
        """(blocks, 4), like `BlockMap.ranges`: first visible, first full, end of full, end of visible."""
        xp = _array_module(self.start)
        first = self.start // other_block
        end = xp.maximum(-(-self.end // other_block), first)
        full = xp.clip(-(-self.full_start // other_block), first, end)
        return xp.stack([first, full, xp.clip(self.full_end // other_block, full, end), end], 1)

    def block_map(self, other_block: int, other_count: int) -> BlockMap:
        """The visible and full pairs of blocks, in one row."""
        start = np.arange(other_count, dtype=np.int32)[None] * other_block
        end = start + other_block
        visible = (self.start[:, None] < end) & (self.end[:, None] > start)
        full = (self.full_start[:, None] <= start) & (self.full_end[:, None] >= end)
        return BlockMap(visible[None], (visible & full)[None])


def spans(interval: Interval, block: int, other_length: int, is_padding_masked: bool = False) -> Spans:
    """The spans of blocks from the intervals of their tokens.

    Padding in the last block sees nothing. It does not keep a pair of blocks from being full, unless the kernel has to
    mask it.

    >>> start, end = np.array([0, 0, 1]), np.array([1, 2, 3])
    >>> result = spans((start, end), block=2, other_length=3)
    >>> result.start.tolist(), result.end.tolist(), result.full_start.tolist(), result.full_end.tolist()
    ([0, 1], [2, 3], [0, 1], [1, 3])
    """
    start, end = interval
    xp, (length,) = _array_module(start), start.shape
    count = block_count(length, block)
    is_token = np.arange(count * block).reshape(count, block) < length
    start, end = (pad_to(x, 0, count * block).reshape(count, block) for x in (start, end))
    sees = is_token & (start < end)
    return Spans(
        xp.where(sees, start, other_length).min(1),
        xp.where(sees, end, 0).max(1),
        xp.where(is_token, start, 0).max(1),
        xp.where(is_token, end, 0 if is_padding_masked else other_length).min(1),
    )


def interval_map(arguments: Arguments, q_block: int, k_block: int) -> BlockMap:
    """Blocks of queries and keys by causality, window, packed sequences and positions: NumPy without the last two, in
    one row without the last.
    """
    if has_positions(arguments):
        return position_map(arguments, q_block, k_block)
    k_length = arguments["key"].shape[1]
    return spans(key_intervals(arguments), q_block, k_length).block_map(k_block, block_count(k_length, k_block))


def position_map(arguments: Arguments, q_block: int, k_block: int) -> BlockMap:
    """Blocks of queries and of slots by their positions, for each batch entry; a block without a key is not visible.

    >>> query, key = (jax.ShapeDtypeStruct((1, length, 2, 16), "float32") for length in (2, 8))
    >>> call = {"query": query, "key": key, "causal": True, "sliding_window": None, "kv_positions": None}
    >>> result = position_map({**call, "q_start": jnp.array([3]), "kv_lengths": jnp.array([5])}, 2, 2)
    >>> result.visible.tolist(), result.full.tolist()
    ([[[True, True, True, False]]], [[[True, True, False, False]]])
    """
    left, right = band(arguments["causal"], arguments["sliding_window"])
    low, high, is_whole = (x[:, None] for x in slot_extremes(arguments, k_block))
    q_low, q_high = (x[:, :, None] for x in query_extremes(arguments, q_block))
    visible, full = low <= high, is_whole
    if left is not None:
        visible, full = visible & (high >= q_low - left), full & (low >= q_high - left)
    if right is not None:
        visible, full = visible & (low <= q_high + right), full & (high <= q_low + right)
    shape = (len(q_low), q_low.shape[1], low.shape[2])
    return BlockMap(jnp.broadcast_to(visible, shape), jnp.broadcast_to(visible & full, shape))


def query_extremes(arguments: Arguments, block: int) -> tuple[jax.Array, jax.Array]:
    """The first and the last position of each block of queries, (batch, blocks), without padding."""
    length, start = arguments["query"].shape[1], arguments["q_start"][:, None]
    first = np.arange(block_count(length, block), dtype=np.int32)[None] * np.int32(block)
    return start + first, start + (np.minimum(first + np.int32(block), np.int32(length)) - np.int32(1))


def slot_extremes(arguments: Arguments, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each block of slots, (batch, blocks): the lowest and the highest position of a key, and whether every slot
    holds one. A block without keys has a lowest that is above its highest, and padding is not a key.
    """
    filled, positions = is_filled(arguments), jnp.asarray(key_positions(arguments))
    if filled is None:
        filled = jnp.ones((len(arguments["q_start"]), positions.shape[1]), bool)
    low, high = (split_blocks(jnp.where(filled, positions, fill), block, fill) for fill in (NO_ID, -1))
    return low.min(-1), high.max(-1), split_blocks(filled, block).all(-1)


def segment_extremes(ids: jax.Array, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each block of segment ids: the lowest and the highest, both without padding, and the lowest with padding.

    Ids of 0 and below are padding. A block of nothing else has a lowest that is above its highest.

    >>> [x.tolist() for x in segment_extremes(jnp.array([[2, 3, 1, 0, 0]]), 2)]
    [[[2, 1, 2147483647]], [[3, 1, 0]], [[2, 0, 0]]]
    """
    ids = split_blocks(ids, block)
    return jnp.where(ids > 0, ids, NO_ID).min(-1), ids.max(-1), ids.min(-1)


def segment_map(ids: jax.Array, other_ids: jax.Array, block: int, other_block: int) -> BlockMap:
    """Visible where the ranges of ids overlap, full where both blocks have one id, and the same one.

    >>> result = segment_map(jnp.array([[1, 1, 2, 2]]), jnp.array([[1, 1, 1, 2]]), 2, 2)
    >>> result.visible.tolist(), result.full.tolist()
    ([[[True, True], [False, True]]], [[[True, False], [False, False]]])
    """
    low, high, lowest = (x[:, :, None] for x in segment_extremes(ids, block))
    other_low, other_high, other_lowest = (x[:, None] for x in segment_extremes(other_ids, other_block))
    visible = (low <= other_high) & (other_low <= high)
    return BlockMap(visible, (lowest == high) & (high > 0) & (other_lowest == high) & (other_high == high))


def mask_map(mask: jax.Array, q_block: int, k_block: int) -> BlockMap:
    """Visible where a mask, (batch, heads, queries, keys), lets any head see anything, full where all see everything.

    An axis along which the mask broadcasts keeps its length of 1.

    >>> result = mask_map(jnp.array([True, True, True, False, False])[None, None, None], 2, 2)
    >>> result.visible.tolist(), result.full.tolist()
    ([[[True, True, False]]], [[[True, False, False]]])
    """
    return BlockMap(mask_visible(mask, q_block, k_block), _reduce_blocks(mask, True, q_block, k_block))


def mask_visible(mask: jax.Array, q_block: int, k_block: int) -> jax.Array:
    """The visible pairs of `mask_map`."""
    return _reduce_blocks(mask, False, q_block, k_block)


def _reduce_blocks(mask: jax.Array, is_full: bool, q_block: int, k_block: int) -> jax.Array:
    reduce: Any = jnp.all if is_full else jnp.any
    mask = reduce(mask, 1)
    for axis, block in ((1, q_block), (2, k_block)):
        length = mask.shape[axis]
        if length != 1:
            count = block_count(length, block)
            mask = pad_to(mask, axis, count * block, is_full)
            mask = reduce(mask.reshape(*mask.shape[:axis], count, block, *mask.shape[axis + 1 :]), axis + 1)
    return mask


def _array_module(*arrays: Any) -> Any:
    return np if all(isinstance(x, np.ndarray | np.generic) for x in arrays) else jnp
