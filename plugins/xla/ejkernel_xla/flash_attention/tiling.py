"""How an attention call is cut into tiles: the layout of the blocks, which tiles matter, and what a tile's logits are.

A tile is one block of queries against one block of keys, for every batch entry and head at once. Blocks lead in every
array, (blocks, batch, kv heads, ...), so that taking one is taking a contiguous piece. The query heads that share a kv
head are laid under each other, (groups * block) rows, which makes every product of a tile one large matrix product
per kv head and never repeats a key or a value.
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
from ejkernel_ops.flash_attention.tokens import Tokens, band, tokens, visible

Carry = TypeVar("Carry")
Range = tuple[Any, Any, Any, Any]

# Products of 16-bit numbers are exact in float32 however the hardware multiplies. A float32 factor is not: what the
# hardware does by default (TF32 on a GPU, bfloat16 on a TPU) would lose more than the tolerance of a float32 result;
# next to 16-bit factors the intermediate step is enough.
EXACT, CLOSE = lax.Precision.HIGHEST, lax.Precision.HIGH


@attrs.frozen(eq=False)
class Tiling:
    """One call, cut. Made by `tiling`."""

    arguments: Mapping[str, Any]
    q_block: int
    kv_block: int
    q_count: int
    kv_count: int
    tokens: Tokens  # positions (rows, blocks, block), ids likewise, padded to whole blocks
    bias: jax.Array | None  # (batch | 1, kv heads | 1, groups | 1, queries | 1, keys | 1), padded to whole blocks
    mask: jax.Array | None
    ranges: Any  # (query blocks, 4): first, first whole, end of whole, end: the kv blocks a query block meets

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, kv heads, and how many query heads share one."""
        batch, _, heads, _ = self.arguments["query"].shape
        kv_heads = self.arguments["key"].shape[2]
        return batch, kv_heads, heads // kv_heads

    @property
    def dtype(self) -> Any:
        """What is accumulated in: float32, or float64 for float64 inputs."""
        return accumulator(self.arguments)

    # What the logits are multiplied by before a soft cap bends them. Wide inputs fold it into the queries once; a
    # 16-bit query would be rounded by that, so there each tile is scaled instead.

    @property
    def folded(self) -> bool:
        return bool(self.arguments["query"].dtype.itemsize >= 4)

    @property
    def slope(self) -> float:
        return float(self.arguments["softmax_scale"]) / (self.arguments["logits_soft_cap"] or 1.0)

    def queries(self) -> jax.Array:
        """The blocks of queries, (blocks, batch, kv heads, groups * block, head dim)."""
        query = self.arguments["query"]
        return self.cut_queries(query * jnp.asarray(self.slope, query.dtype) if self.folded else query)

    def cut_queries(self, x: jax.Array, fill: float = 0.0) -> jax.Array:
        """(batch, length, heads, features) to (blocks, batch, kv heads, groups * block, features)."""
        batch, kv_heads, groups = self.shape
        x = pad(x, 1, self.q_count * self.q_block, fill)
        x = x.reshape(batch, self.q_count, self.q_block, kv_heads, groups, x.shape[-1])
        return x.transpose(1, 0, 3, 4, 2, 5).reshape(self.q_count, batch, kv_heads, groups * self.q_block, x.shape[-1])

    def join_queries(self, x: jax.Array) -> jax.Array:
        batch, kv_heads, groups = self.shape
        x = x.reshape(self.q_count, batch, kv_heads, groups, self.q_block, x.shape[-1]).transpose(1, 0, 4, 2, 3, 5)
        x = x.reshape(batch, self.q_count * self.q_block, kv_heads * groups, x.shape[-1])
        return x[:, : self.arguments["query"].shape[1]]

    def cut_keys(self, x: jax.Array) -> jax.Array:
        """(batch, length, kv heads, features) to (blocks, batch, kv heads, block, features)."""
        batch, kv_heads, _ = self.shape
        x = pad(x, 1, self.kv_count * self.kv_block)
        return x.reshape(batch, self.kv_count, self.kv_block, kv_heads, x.shape[-1]).transpose(1, 0, 3, 2, 4)

    def join_keys(self, x: jax.Array) -> jax.Array:
        batch, kv_heads, _ = self.shape
        x = x.transpose(1, 0, 3, 2, 4).reshape(batch, self.kv_count * self.kv_block, kv_heads, x.shape[-1])
        return x[:, : self.arguments["key"].shape[1]]

    def cut_rows(self, x: jax.Array, fill: float = 0.0) -> jax.Array:
        """(batch, heads, length) to (blocks, batch, kv heads, groups, block, 1), ready to meet a tile."""
        batch, kv_heads, groups = self.shape
        x = pad(x, 2, self.q_count * self.q_block, fill)
        x = x.reshape(batch, kv_heads, groups, self.q_count, self.q_block, 1)
        return x.transpose(3, 0, 1, 2, 4, 5)

    def join_rows(self, x: jax.Array) -> jax.Array:
        batch, kv_heads, groups = self.shape
        x = x.transpose(1, 2, 3, 0, 4, 5).reshape(batch, kv_heads * groups, self.q_count * self.q_block)
        return x[:, :, : self.arguments["query"].shape[1]]

    def sweep(self, i: Any, tile: Callable[[Any, Carry, bool], Carry], carry: Carry) -> Carry:
        """Run ``tile(j, carry, masked)`` for the kv blocks that query block i meets, and for no others.

        Whole tiles, in which every query sees every key, come first and are told not to look at masks; the tiles at
        the edges follow. The order is free, the accumulation is the same; two loops over two bodies avoid a branch.
        """
        first, whole, whole_end, end = self._range(i)
        if not _same(whole, whole_end):
            carry = lax.fori_loop(whole, whole_end, lambda j, carry: tile(j, carry, False), carry)
        if _same(first, whole) and _same(whole_end, end):
            return carry

        def edge(t: Any, carry: Carry) -> Carry:
            return tile(jnp.where(t < whole, t, t + (whole_end - whole)), carry, True)

        return cast(Carry, lax.fori_loop(first, end - (whole_end - whole), edge, carry))

    def _range(self, i: Any) -> Range:
        # A column of the table that is the same for all query blocks, or is always equal to its neighbour, is known
        # to `sweep` while tracing; the loops that it makes empty are then not there at all.
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

    def logits(self, query: jax.Array, key: jax.Array, i: Any, j: Any, masked: bool) -> tuple[jax.Array, Any]:
        """The logits of a tile, (batch, kv heads, groups, block, block), and the tanh of its soft cap or None."""
        batch, kv_heads, groups = self.shape
        x = self.outer(query, key)
        x = x.reshape(batch, kv_heads, groups, self.q_block, self.kv_block)
        if not self.folded:
            x = x * self.slope
        bent = None
        if self.arguments["logits_soft_cap"] is not None:
            bent = jnp.tanh(x)
            x = bent * self.arguments["logits_soft_cap"]
        if self.bias is not None:
            x = x + self.piece(self.bias, i, j).astype(x.dtype)
        if masked:
            x = jnp.where(self._seen(i, j), x, -jnp.inf)
        return x, bent

    def kept(self, i: Any, j: Any) -> jax.Array:
        """Which weights of a tile survive dropout."""
        batch, kv_heads, groups = self.shape
        row = np.arange(batch * kv_heads * groups, dtype=np.uint32).reshape(batch, kv_heads, groups, 1, 1)
        q_index = i * self.q_block + np.arange(self.q_block, dtype=np.int32).reshape(1, 1, 1, -1, 1)
        k_index = j * self.kv_block + np.arange(self.kv_block, dtype=np.int32).reshape(1, 1, 1, 1, -1)
        return keep_mask(self.arguments["dropout_seed"], self.arguments["dropout_prob"], row, q_index, k_index)

    def piece(self, x: jax.Array, i: Any, j: Any) -> jax.Array:
        """The part of a bias or mask that belongs to a tile."""
        start, size = self.place(x, i, j)
        return jnp.asarray(lax.dynamic_slice(x, start, size))

    def place(self, x: jax.Array, i: Any, j: Any) -> tuple[list[Any], tuple[int, ...]]:
        """Where that part starts, and its shape: a broadcast axis stays where it is."""
        q_start, q_size = (0, 1) if x.shape[3] == 1 else (i * self.q_block, self.q_block)
        k_start, k_size = (0, 1) if x.shape[4] == 1 else (j * self.kv_block, self.kv_block)
        return [jnp.int32(n) for n in (0, 0, 0, q_start, k_start)], (*x.shape[:3], q_size, k_size)

    def outer(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Rows against keys: both as they were given, so that 16-bit numbers meet as such."""
        return self._product("bhrd,bhkd->bhrk", x, y, EXACT if self.folded else None)

    def inner(self, subscripts: str, weights: jax.Array, y: jax.Array) -> jax.Array:
        """A tile of weights against rows or keys: the weights stay in the accumulator's precision."""
        batch, kv_heads, groups = self.shape
        weights = weights.reshape(batch, kv_heads, groups * self.q_block, self.kv_block)
        return self._product(subscripts, weights, y.astype(weights.dtype), EXACT if self.folded else CLOSE)

    def _product(self, subscripts: str, x: jax.Array, y: jax.Array, precision: Any) -> jax.Array:
        product: jax.Array = jnp.einsum(subscripts, x, y, preferred_element_type=self.dtype, precision=precision)
        return product

    def _seen(self, i: Any, j: Any) -> jax.Array:
        left, right = _band(self.arguments)
        at_i, at_j = partial(_block, i), partial(_block, j)
        groups = tuple((at_i(q_ids), at_j(k_ids)) for q_ids, k_ids in self.tokens.groups)
        seen = visible(at_i(self.tokens.q_position), at_j(self.tokens.k_position), groups, left, right)
        # The tokens that only fill the last block up are keys to nobody.
        real = j * self.kv_block + np.arange(self.kv_block, dtype=np.int32) < self.arguments["key"].shape[1]
        real = real.reshape(1, 1, 1, 1, -1)
        seen = real if seen is None else seen[:, None, None] & real
        return jnp.asarray(seen if self.mask is None else seen & self.piece(self.mask, i, j))


def tiling(arguments: Mapping[str, Any], q_block: int, kv_block: int) -> Tiling:
    """Cut a call into blocks of at most this many queries and keys."""
    q_length, k_length = arguments["query"].shape[1], arguments["key"].shape[1]
    q_block, q_count = blocks(q_length, q_block)
    kv_block, kv_count = blocks(k_length, kv_block)
    uncut = tokens(arguments)
    cut = Tokens(
        _cut(uncut.q_position, q_count, q_block, "edge"),
        _cut(uncut.k_position, kv_count, kv_block, "edge"),
        tuple((_cut(q, q_count, q_block), _cut(k, kv_count, kv_block)) for q, k in uncut.groups),
    )
    place = partial(_by_kv_head, kv_heads=arguments["key"].shape[2], lengths=(q_count * q_block, kv_count * kv_block))
    bias, mask = place(arguments["bias"]), place(arguments["attention_mask"])
    meets, whole = _meetings(cut, *_band(arguments))
    whole = whole & (np.arange(1, kv_count + 1) * kv_block <= k_length)[None]
    if mask is not None:
        counts = (q_count, q_block, kv_count, kv_block)
        meets, whole = meets & _over_tiles(jnp.any, mask, *counts), whole & _over_tiles(jnp.all, mask, *counts)
    shape = (q_count, kv_count)
    ranges = _ranges(*(_library(x).broadcast_to(x, shape) for x in (meets, whole & meets)))
    return Tiling(arguments, q_block, kv_block, q_count, kv_count, cut, bias, mask, ranges)


def accumulator(arguments: Mapping[str, Any]) -> Any:
    """The dtype of statistics and sums."""
    return jnp.promote_types(arguments["query"].dtype, jnp.float32)


def blocks(length: int, block: int) -> tuple[int, int]:
    """The size and the number of blocks: even ones, so that little is padded, and at least one.

    >>> blocks(257, 128), blocks(7, 128), blocks(4096, 512), blocks(0, 128)
    ((88, 3), (7, 1), (512, 8), (1, 1))
    """
    count = max(1, math.ceil(length / block))
    size = max(1, math.ceil(length / count))
    if count > 1:
        step = max(8, block // 16)
        size = min(block, math.ceil(size / step) * step)
    return size, max(1, math.ceil(length / size))


def pad(x: jax.Array, axis: int, length: int, fill: float | bool = 0) -> jax.Array:
    """Fill an axis up at its end."""
    missing = length - x.shape[axis]
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)], constant_values=fill)


def _meetings(cut: Tokens, left: int | None, right: int | None) -> tuple[Any, Any]:
    # Two maps of (query blocks, kv blocks), from the extremes of each block alone: in which tiles may anybody see
    # anything (too many is slow, too few is wrong), and in which does everybody see everything (the other way round).
    np_or_jnp = _library(cut.q_position, cut.k_position, *(ids for pair in cut.groups for ids in pair))
    nearest = cut.k_position.min(-1)[:, None, :] - cut.q_position.max(-1)[:, :, None]
    farthest = cut.k_position.max(-1)[:, None, :] - cut.q_position.min(-1)[:, :, None]
    meets = whole = np_or_jnp.ones((1, 1, 1), bool)
    if left is not None:
        meets, whole = meets & (farthest >= -left), whole & (nearest >= -left)
    if right is not None:
        meets, whole = meets & (nearest <= right), whole & (farthest <= right)
    for q_ids, k_ids in cut.groups:
        q_low, q_high, q_one = (x[:, :, None] for x in _extremes(q_ids))
        k_low, k_high, k_one = (x[:, None, :] for x in _extremes(k_ids))
        meets = meets & (q_low <= k_high) & (k_low <= q_high)
        whole = whole & q_one & k_one & (q_high == k_high)
    return meets.any(0), whole.all(0)


def _extremes(ids: Any) -> tuple[Any, Any, Any]:
    # The lowest and the highest id of each block, padding aside, and whether there is but one and no padding.
    largest = np.iinfo(np.int32).max
    low = jnp.where(ids > 0, ids, largest).min(-1)
    high = jnp.maximum(ids.max(-1), 0)
    return low, high, ids.min(-1) == jnp.where(high > 0, high, largest)


def _ranges(meets: Any, whole: Any) -> Any:
    # For every query block one range of kv blocks, and inside it one run of whole ones: loops need no lists.
    xp = _library(meets, whole)
    count, index = meets.shape[1], np.arange(meets.shape[1])[None]
    first, end = meets.argmax(1), count - meets[:, ::-1].argmax(1)
    end = xp.where(meets.any(1), end, first)
    run = xp.where(whole.any(1), whole.argmax(1), first)
    broken = ~whole & (index >= run[:, None])
    run_end = xp.where(broken.any(1), broken.argmax(1), count)
    run_end = xp.where(whole.any(1), run_end, run)
    return xp.stack([first, run, run_end, end], 1).astype(np.int32)


def _by_kv_head(x: jax.Array | None, kv_heads: int, lengths: tuple[int, int]) -> jax.Array | None:
    if x is None:
        return None
    batch, heads, q_length, k_length = x.shape
    # One query head stands for all of them, unless there is only one.
    x = x.reshape(batch, *((1, 1) if heads == 1 else (kv_heads, heads // kv_heads)), q_length, k_length)
    for axis, length in zip((3, 4), lengths, strict=True):
        x = x if x.shape[axis] == 1 else pad(x, axis, length)
    return x


def _over_tiles(reduce: Any, mask: jax.Array, q_count: int, q_block: int, kv_count: int, kv_block: int) -> Any:
    queries = (1, 1) if mask.shape[3] == 1 else (q_count, q_block)
    keys = (1, 1) if mask.shape[4] == 1 else (kv_count, kv_block)
    return reduce(reduce(mask, (0, 1, 2)).reshape(*queries, *keys), (1, 3))


def _cut(x: Any, count: int, block: int, mode: str = "constant") -> Any:
    missing = count * block - x.shape[1]
    if missing:
        mode = mode if x.shape[1] else "constant"
        x = _library(x).pad(x, ((0, 0), (0, missing)), mode=mode)
    return x.reshape(x.shape[0], count, block)


def _block(index: Any, x: Any) -> Any:
    return lax.dynamic_index_in_dim(jnp.asarray(x), index, 1, keepdims=False)


def _band(arguments: Mapping[str, Any]) -> tuple[int | None, int | None]:
    return band(arguments["causal"], arguments["sliding_window"])


def _library(*arrays: Any) -> Any:
    return np if all(isinstance(x, np.ndarray | np.generic) for x in arrays) else jnp


def _same(x: Any, y: Any) -> bool:
    return x is y or (isinstance(x, int) and isinstance(y, int) and x == y)
