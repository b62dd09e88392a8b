"""An attention call in tiles: the layout of the blocks, which pairs of blocks are computed, and the logits of a tile.

A tile is one block of queries against one block of keys, for all batch entries and heads at once. Every array has its
blocks first, (blocks, batch, kv heads, ...), so that one block is contiguous. The query heads that share a kv head are
stacked, (groups * block) rows: each product of a tile is one large matrix product per kv head, and no key or value is
repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel_ops.flash_attention.dropout import keep_mask
from ejkernel_ops.flash_attention.geometry import (
    BlockMap,
    interval_map,
    mask_map,
    pad_to,
    segment_map,
    split_blocks,
)
from ejkernel_ops.flash_attention.positions import has_positions, is_filled
from ejkernel_ops.flash_attention.statistics import statistics_dtype
from ejkernel_ops.flash_attention.tokens import Tokens, band, tokens, visible

Carry = TypeVar("Carry")
Range = tuple[Any, Any, Any, Any]
KeyBlocks = Callable[[Any, bool], jax.Array]

# Products of 16-bit numbers are exact in float32 on any hardware. Those of float32 numbers are not: by default (TF32 on
# a GPU, bfloat16 on a TPU) they would lose more than the tolerance of a float32 result. HIGH is enough where only one
# factor is float32.
EXACT, CLOSE = lax.Precision.HIGHEST, lax.Precision.HIGH


@attrs.frozen(eq=False)
class Tiling:
    """One call in blocks, as `tiling` returns it."""

    arguments: Mapping[str, Any]
    q_block: int
    kv_block: int
    q_count: int
    kv_count: int
    tokens: Tokens  # positions (rows, blocks, block), ids likewise, padded to whole blocks
    bias: jax.Array | None  # (batch | 1, kv heads | 1, groups | 1, queries | 1, keys | 1), padded to whole blocks
    mask: jax.Array | None
    filled: jax.Array | None  # (batch, blocks, block): which slots of a cache hold a key; None if all do
    ranges: Any  # (query blocks, 4): of the kv blocks that a query block sees, as in `BlockMap.ranges`

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, kv heads, and how many query heads share one."""
        batch, _, heads, _ = self.arguments["query"].shape
        kv_heads = self.arguments["key"].shape[2]
        return batch, kv_heads, heads // kv_heads

    @property
    def dtype(self) -> Any:
        """The dtype of sums and statistics."""
        return statistics_dtype(self.arguments)

    # Logits are multiplied by the scale, divided by a soft cap if there is one. float32 queries are multiplied once.
    # That would round 16-bit queries, so with those each tile is multiplied.

    @property
    def has_scaled_queries(self) -> bool:
        return bool(self.arguments["query"].dtype.itemsize >= 4)

    @property
    def scale(self) -> float:
        return float(self.arguments["softmax_scale"]) / (self.arguments["logits_soft_cap"] or 1.0)

    def queries(self) -> jax.Array:
        """The blocks of queries, (blocks, batch, kv heads, groups * block, head dim)."""
        query = self.arguments["query"]
        return self.split_queries(query * jnp.asarray(self.scale, query.dtype) if self.has_scaled_queries else query)

    def split_queries(self, x: jax.Array, fill: float = 0.0) -> jax.Array:
        """(batch, length, heads, features) to (blocks, batch, kv heads, groups * block, features)."""
        batch, kv_heads, groups = self.shape
        x = pad_to(x, 1, self.q_count * self.q_block, fill)
        x = x.reshape(batch, self.q_count, self.q_block, kv_heads, groups, x.shape[-1])
        return x.transpose(1, 0, 3, 4, 2, 5).reshape(self.q_count, batch, kv_heads, groups * self.q_block, x.shape[-1])

    def join_queries(self, x: jax.Array) -> jax.Array:
        batch, kv_heads, groups = self.shape
        x = x.reshape(self.q_count, batch, kv_heads, groups, self.q_block, x.shape[-1]).transpose(1, 0, 4, 2, 3, 5)
        x = x.reshape(batch, self.q_count * self.q_block, kv_heads * groups, x.shape[-1])
        return x[:, : self.arguments["query"].shape[1]]

    def split_keys(self, x: jax.Array) -> jax.Array:
        """(batch, length, kv heads, features) to (blocks, batch, kv heads, block, features)."""
        batch, kv_heads, _ = self.shape
        x = pad_to(x, 1, self.kv_count * self.kv_block)
        return x.reshape(batch, self.kv_count, self.kv_block, kv_heads, x.shape[-1]).transpose(1, 0, 3, 2, 4)

    def key_blocks(self, x: jax.Array) -> KeyBlocks:
        """A function of ``j`` and of whether the tile is masked: the block of keys or values, (batch, kv heads, block,
        features). In masked tiles, it has zeros in the place of what empty slots of a cache hold.
        """
        # Read once at most, another layout would be a copy of the whole cache for the few keys that it holds.
        is_sliced = has_positions(self.arguments) and self.q_count == 1 and x.shape[1] >= self.kv_block
        blocks = None if is_sliced else self.split_keys(x)
        filled = None if self.filled is None else self.filled[:, :, None, :, None]

        def block(j: Any, is_masked: bool) -> jax.Array:
            values = self._slice_of_keys(x, j) if blocks is None else blocks[j]
            return jnp.where(_block(j, filled), values, 0) if is_masked and filled is not None else values

        return block

    def _slice_of_keys(self, x: jax.Array, j: Any) -> jax.Array:
        """Block ``j`` of ``split_keys(x)``, without its copy of ``x``."""
        length, start = x.shape[1], j * self.kv_block
        keys = lax.dynamic_slice_in_dim(x, start, self.kv_block, 1)
        if self.kv_count * self.kv_block > length:
            # A slice does not go past the end. The last block has earlier keys too, which are those of another block.
            earlier = jnp.maximum(start + self.kv_block - length, 0)
            is_own = jnp.arange(self.kv_block) < self.kv_block - earlier
            keys = jnp.where(is_own[None, :, None, None], jnp.roll(keys, -earlier, 1), 0)
        return keys.swapaxes(1, 2)

    def shape_of_blocks(self, x: jax.Array) -> tuple[int, ...]:
        """The shape of ``split_keys(x)``."""
        batch, kv_heads, _ = self.shape
        return self.kv_count, batch, kv_heads, self.kv_block, x.shape[-1]

    def join_keys(self, x: jax.Array) -> jax.Array:
        batch, kv_heads, _ = self.shape
        x = x.transpose(1, 0, 3, 2, 4).reshape(batch, self.kv_count * self.kv_block, kv_heads, x.shape[-1])
        return x[:, : self.arguments["key"].shape[1]]

    def split_rows(self, x: jax.Array, fill: float = 0.0) -> jax.Array:
        """(batch, heads, length) to (blocks, batch, kv heads, groups, block, 1), which broadcasts against a tile."""
        batch, kv_heads, groups = self.shape
        x = pad_to(x, 2, self.q_count * self.q_block, fill)
        x = x.reshape(batch, kv_heads, groups, self.q_count, self.q_block, 1)
        return x.transpose(3, 0, 1, 2, 4, 5)

    def join_rows(self, x: jax.Array) -> jax.Array:
        batch, kv_heads, groups = self.shape
        x = x.transpose(1, 2, 3, 0, 4, 5).reshape(batch, kv_heads * groups, self.q_count * self.q_block)
        return x[:, :, : self.arguments["query"].shape[1]]

    def loop(self, i: Any, tile: Callable[[Any, Carry, bool], Carry], carry: Carry) -> Carry:
        """Run ``tile(j, carry, is_masked)`` for the kv blocks that query block i sees, and for no others.

        Full blocks come first, without the mask, and then the partial ones on both sides of them. Sums do not depend
        on the order, and two loops need no branch.
        """
        first, full, full_end, end = self._range(i)
        if not _same(full, full_end):
            carry = lax.fori_loop(full, full_end, lambda j, carry: tile(j, carry, False), carry)
        if _same(first, full) and _same(full_end, end):
            return carry

        def partial_tile(t: Any, carry: Carry) -> Carry:
            return tile(jnp.where(t < full, t, t + (full_end - full)), carry, True)

        return cast(Carry, lax.fori_loop(first, end - (full_end - full), partial_tile, carry))

    def _range(self, i: Any) -> Range:
        # If all query blocks have the same range, or two neighbouring columns are equal, `loop` knows it while tracing
        # and leaves out the loops that are empty.
        if not isinstance(self.ranges, np.ndarray):
            return cast(Range, tuple(self.ranges[i]))
        columns = list(self.ranges.T)
        if all((column == column[0]).all() for column in columns):
            return cast(Range, tuple(int(column[0]) for column in columns))
        row = list(jnp.asarray(self.ranges)[i])
        for left, right in ((0, 1), (1, 2), (2, 3)):
            if (columns[left] == columns[right]).all():
                row[right] = row[left]
        return cast(Range, tuple(row))

    def logits(self, query: jax.Array, key: jax.Array, i: Any, j: Any, is_masked: bool) -> tuple[jax.Array, Any]:
        """The logits of a tile, (batch, kv heads, groups, block, block), and the tanh of its soft cap or None."""
        batch, kv_heads, groups = self.shape
        x = self.products(query, key)
        x = x.reshape(batch, kv_heads, groups, self.q_block, self.kv_block)
        if not self.has_scaled_queries:
            x = x * self.scale
        tanh = None
        if self.arguments["logits_soft_cap"] is not None:
            tanh = jnp.tanh(x)
            x = tanh * self.arguments["logits_soft_cap"]
        if self.bias is not None:
            x = x + self.block_of(self.bias, i, j).astype(x.dtype)
        if is_masked:
            x = jnp.where(self._visible(i, j), x, -jnp.inf)
        return x, tanh

    def keep_mask(self, i: Any, j: Any) -> jax.Array:
        """Which weights of a tile survive dropout."""
        batch, kv_heads, groups = self.shape
        row = np.arange(batch * kv_heads * groups, dtype=np.uint32).reshape(batch, kv_heads, groups, 1, 1)
        q_index = i * self.q_block + np.arange(self.q_block, dtype=np.int32).reshape(1, 1, 1, -1, 1)
        k_index = j * self.kv_block + np.arange(self.kv_block, dtype=np.int32).reshape(1, 1, 1, 1, -1)
        return keep_mask(self.arguments["dropout_seed"], self.arguments["dropout_prob"], row, q_index, k_index)

    def block_of(self, x: jax.Array, i: Any, j: Any) -> jax.Array:
        """The block of a bias or mask that belongs to a tile."""
        start, size = self.place(x, i, j)
        return jnp.asarray(lax.dynamic_slice(x, start, size))

    def place(self, x: jax.Array, i: Any, j: Any) -> tuple[list[Any], tuple[int, ...]]:
        """Where that block starts, and its shape, with 1 for an axis that broadcasts."""
        q_start, q_size = (0, 1) if x.shape[3] == 1 else (i * self.q_block, self.q_block)
        k_start, k_size = (0, 1) if x.shape[4] == 1 else (j * self.kv_block, self.kv_block)
        return [jnp.int32(n) for n in (0, 0, 0, q_start, k_start)], (*x.shape[:3], q_size, k_size)

    def products(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The product of each row with each key, in the dtype of the inputs: 16-bit numbers are multiplied as such."""
        return self._product("bhrd,bhkd->bhrk", x, y, EXACT if self.has_scaled_queries else None)

    def weighted_sums(self, subscripts: str, weights: jax.Array, y: jax.Array) -> jax.Array:
        """The sums of rows or keys, weighted by a tile, with weights in the dtype of sums."""
        batch, kv_heads, groups = self.shape
        weights = weights.reshape(batch, kv_heads, groups * self.q_block, self.kv_block)
        return self._product(subscripts, weights, y.astype(weights.dtype), EXACT if self.has_scaled_queries else CLOSE)

    def _product(self, subscripts: str, x: jax.Array, y: jax.Array, precision: Any) -> jax.Array:
        product: jax.Array = jnp.einsum(subscripts, x, y, preferred_element_type=self.dtype, precision=precision)
        return product

    def _visible(self, i: Any, j: Any) -> jax.Array:
        left, right = _band(self.arguments)
        of_queries, of_keys = partial(_block, i), partial(_block, j)
        groups = tuple((of_queries(q_ids), of_keys(k_ids)) for q_ids, k_ids in self.tokens.groups)
        positions = of_queries(self.tokens.q_position), of_keys(self.tokens.k_position)
        mask = visible(*positions, groups, left, right)
        is_key = j * self.kv_block + np.arange(self.kv_block, dtype=np.int32) < self.arguments["key"].shape[1]
        is_key = is_key.reshape(1, 1, 1, 1, -1)
        mask = is_key if mask is None else mask[:, None, None] & is_key
        return jnp.asarray(mask if self.mask is None else mask & self.block_of(self.mask, i, j))


def tiling(arguments: Mapping[str, Any], q_block: int, kv_block: int) -> Tiling:
    """Split a call into blocks of at most this many queries and keys."""
    q_length, k_length = arguments["query"].shape[1], arguments["key"].shape[1]
    q_block, q_count = even_blocks(q_length, q_block)
    kv_block, kv_count = even_blocks(k_length, kv_block)
    where, pairs = tokens(arguments), interval_map(arguments, q_block, kv_block)
    blocks_of_tokens = Tokens(
        split_blocks(where.q_position, q_block),
        split_blocks(where.k_position, kv_block),
        tuple((split_blocks(q_ids, q_block), split_blocks(k_ids, kv_block)) for q_ids, k_ids in where.groups),
    )
    place = partial(_by_kv_head, kv_heads=arguments["key"].shape[2], lengths=(q_count * q_block, kv_count * kv_block))
    bias, mask = place(arguments["bias"]), place(arguments["attention_mask"])
    if arguments["q_segment_ids"] is not None:
        pairs &= segment_map(arguments["q_segment_ids"], arguments["kv_segment_ids"], q_block, kv_block)
    if mask is not None:
        pairs &= mask_map(arguments["attention_mask"], q_block, kv_block)
    # One loop serves the whole batch: a pair is visible if any entry sees it, and full if it is full for all of them.
    pairs = BlockMap(pairs.visible.any(0)[None], pairs.full.all(0)[None])
    filled = is_filled(arguments)
    blocks_of_slots = None if filled is None else split_blocks(filled, kv_block)
    ranges = pairs.ranges()[0]
    return Tiling(
        arguments, q_block, kv_block, q_count, kv_count, blocks_of_tokens, bias, mask, blocks_of_slots, ranges
    )


def even_blocks(length: int, block: int) -> tuple[int, int]:
    """The size and the number of blocks, at least one. They are of even sizes, so that there is little padding.

    >>> even_blocks(257, 128), even_blocks(7, 128), even_blocks(4096, 512), even_blocks(0, 128)
    ((88, 3), (7, 1), (512, 8), (1, 1))
    """
    count = max(1, math.ceil(length / block))
    size = max(1, math.ceil(length / count))
    if count > 1:
        step = max(8, block // 16)
        size = min(block, math.ceil(size / step) * step)
    return size, max(1, math.ceil(length / size))


def _by_kv_head(x: jax.Array | None, kv_heads: int, lengths: tuple[int, int]) -> jax.Array | None:
    if x is None:
        return None
    batch, heads, q_length, k_length = x.shape
    # A single head broadcasts against both axes.
    x = x.reshape(batch, *((1, 1) if heads == 1 else (kv_heads, heads // kv_heads)), q_length, k_length)
    for axis, length in zip((3, 4), lengths, strict=True):
        x = x if x.shape[axis] == 1 else pad_to(x, axis, length)
    return x


def _block(index: Any, x: Any) -> Any:
    return lax.dynamic_index_in_dim(jnp.asarray(x), index, 1, keepdims=False)


def _band(arguments: Mapping[str, Any]) -> tuple[int | None, int | None]:
    return band(arguments["causal"], arguments["sliding_window"])


def _same(x: Any, y: Any) -> bool:
    return x is y or (isinstance(x, int) and isinstance(y, int) and x == y)
