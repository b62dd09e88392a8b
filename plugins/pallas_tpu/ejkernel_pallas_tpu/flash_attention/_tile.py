"""Device code that the passes share: one block of queries against one block of keys of one head.

A tile is (queries, keys), or transposed (keys, queries): a pass that sums over queries multiplies by transposed tiles,
and a product whose left side has to be transposed first is slow. What is one number for each query is stored as a row:
a transposed tile takes it as it is, and another one transposes it into a column, once for each block. Python decides
while the kernel is traced which code there is: features that a call does not use cost nothing.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from ejkernel_ops.flash_attention.statistics import LOG2E
from ejkernel_pallas_tpu.flash_attention._problem import LANES, Problem
from ejkernel_pallas_tpu.flash_attention._scalars import Entry
from ejkernel_pallas_tpu.online_softmax.products import matmul_transposed, widen


def column(row: Any) -> Any:
    """(1, n) as (n, lanes), the same in every lane."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def row(column: Any) -> Any:
    """(n, lanes), the same in every lane, as (1, n)."""
    return column.T[:1]


def tile_shape(p: Problem, is_transposed: bool) -> tuple[int, int]:
    return (p.k_block, p.q_block) if is_transposed else (p.q_block, p.k_block)


def align_queries(x: Any, p: Problem, is_transposed: bool) -> Any:
    """A row of one number for each query, in a shape that broadcasts against a tile."""
    return x if is_transposed else widen(column(x), p.k_block)


def align_keys(x: Any, p: Problem, is_transposed: bool) -> Any:
    """A row of one number for each key, likewise."""
    return widen(column(x), p.q_block) if is_transposed else x


def logits(
    p: Problem, refs: Any, entry: Entry, i: Any, j: Any, is_masked: bool, is_transposed: bool = False
) -> tuple[Any, Any]:
    """The logits in base 2, -inf where they are masked, and the derivative of the soft cap, or None without one."""
    q, k = refs.query[...], without_unfilled(refs.key[...], p, refs, entry, j, is_masked)
    x = matmul_transposed(k, q) if is_transposed else matmul_transposed(q, k)
    x, derivative = in_base_2(p, x)
    if p.bias:
        x = x + _align(refs.bias[...].astype(jnp.float32), p, p.bias, is_transposed) * LOG2E
    if is_masked:
        visible = _visible(p, refs, entry, i, j, is_transposed)
        x = x if visible is None else jnp.where(visible, x, -jnp.inf)
    return x, derivative


def in_base_2(p: Problem, products: Any) -> tuple[Any, Any]:
    """The logits of products of queries and keys, before a bias, and the derivative of the soft cap or None."""
    if p.cap:
        tanh = jnp.tanh(products * (p.scale / p.cap))
        return tanh * (p.cap * LOG2E), 1.0 - tanh * tanh
    return products * (p.scale * LOG2E), None


def without_unfilled(x: Any, p: Problem, refs: Any, entry: Entry, j: Any, is_masked: bool) -> Any:
    """A block of keys or values, with 0 in empty slots: their weight is 0, but 0 times NaN would be NaN. A tile that is
    not masked has none.
    """
    return zero_unfilled(x, p, refs, entry, j) if is_masked and p.empty is not None else x


def zero_unfilled(x: Any, p: Problem, refs: Any, entry: Entry, j: Any) -> Any:
    """The same for a block that may have empty slots, or slots behind the end of the keys."""
    if p.empty == "positions":
        is_filled = widen(column(refs.k_positions[...]), x.shape[1]) >= 0
    else:
        is_filled = lax.broadcasted_iota(jnp.int32, x.shape, 0) < entry.length - j * p.k_block
    # It is chosen in float32: the mask of 16 bits would have another layout.
    return jnp.where(is_filled, x.astype(jnp.float32), 0.0).astype(x.dtype)


def _align(x: Any, p: Problem, layout: str, is_transposed: bool) -> Any:
    """A block of a bias or mask, in a shape that broadcasts against a tile."""
    if layout == "queries":
        return align_queries(x, p, is_transposed)
    if layout == "keys":
        return align_keys(x, p, is_transposed)
    return x.T if is_transposed else x


def _visible(p: Problem, refs: Any, entry: Entry, i: Any, j: Any, is_transposed: bool) -> Any:
    """The mask of a tile, or None if nothing hides anything."""
    mask = None

    def require(condition: Any) -> None:
        nonlocal mask
        mask = condition if mask is None else mask & condition

    if p.packed:
        key = lax.broadcasted_iota(jnp.int32, tile_shape(p, is_transposed), 0 if is_transposed else 1)
        index = key + j * p.k_block
        require(index >= align_queries(refs.start[...], p, is_transposed))
        require(index < align_queries(refs.end[...], p, is_transposed))
    else:
        mask = position_mask(p, refs, entry, i, j, is_transposed)
    if p.segments:
        q_ids, k_ids = refs.q_ids[...], refs.k_ids[...]
        # Padding gets ids that differ on the two sides, so that one comparison for each pair is enough.
        k_ids = jnp.where(k_ids > 0, k_ids, -1)
        q_ids = jnp.where(q_ids > 0, q_ids, -2)
        require(align_queries(q_ids, p, is_transposed) == align_keys(k_ids, p, is_transposed))
    if p.mask:
        require(_align(refs.mask[...].astype(jnp.int32), p, p.mask, is_transposed) != 0)
    return mask


def position_mask(
    p: Problem, refs: Any, entry: Entry, i: Any, j: Any, is_transposed: bool = False, query: Any = None
) -> Any:
    """Which keys of a tile are there, and seen by causality and window; None if all of them are.

    ``query`` has for each row the number of its query in the block; by default, each row is the next query.
    """
    mask = None

    def require(condition: Any) -> None:
        nonlocal mask
        mask = condition if mask is None else mask & condition

    def query_index() -> Any:
        if query is not None:
            return query
        return lax.broadcasted_iota(jnp.int32, tile_shape(p, is_transposed), 1 if is_transposed else 0)

    key = lax.broadcasted_iota(jnp.int32, tile_shape(p, is_transposed), 0 if is_transposed else 1)
    if p.empty == "positions":
        position = align_keys(refs.k_positions[...], p, is_transposed)
        require(position >= 0)
        distance, start = position - query_index(), i * p.q_block + entry.q_start
        if p.left is not None:
            require(distance >= start - p.left)
        if p.right is not None:
            require(distance <= start + p.right)
        return mask
    # Only the index of the key less that of the query differs within a tile: the rest are scalars.
    distance = key - query_index()
    diagonal = i * p.q_block + entry.q_start - j * p.k_block
    if p.left is not None:
        require(distance >= diagonal - p.left)
    if p.right is not None:
        require(distance <= diagonal + p.right)
    if p.empty or p.k_length < p.k_count * p.k_block:
        require(key < entry.length - j * p.k_block)
    return mask


def keep_mask(p: Problem, seed: Any, head: Any, i: Any, j: Any, is_transposed: bool = False) -> Any:
    """Which weights survive dropout: the operation's own formula, whose sums and products wrap around."""
    state = _mix(_mix(seed + _word(0x9E3779B9)) ^ head)
    queries = i * p.q_block + lax.broadcasted_iota(jnp.int32, (1, p.q_block), 1)
    keys = j * p.k_block + lax.broadcasted_iota(jnp.int32, tile_shape(p, is_transposed), 0 if is_transposed else 1)
    bits = _mix(align_queries(_mix(state ^ queries), p, is_transposed) + keys * _word(0x9E3779B9))
    # The comparison is one of unsigned numbers: with the highest bit flipped, signed ones have the same order.
    return (bits ^ _word(0x80000000)) >= _word(p.threshold ^ 0x80000000)


def _mix(x: Any) -> Any:
    x = x ^ lax.shift_right_logical(x, _like(x, 16))
    x = x * _word(0x7FEB352D)
    x = x ^ lax.shift_right_logical(x, _like(x, 15))
    x = x * _word(0x846CA68B)
    return x ^ lax.shift_right_logical(x, _like(x, 16))


def _word(bits: int) -> Any:
    """32 bits as a signed number."""
    return jnp.int32(bits - 2**32 if bits >= 2**31 else bits)


def _like(x: Any, value: int) -> Any:
    return jnp.full(jnp.shape(x), value, jnp.int32)


def logit_gradients(
    p: Problem, refs: Any, entry: Entry, head: Any, i: Any, j: Any, is_masked: bool, is_transposed: bool
) -> tuple[Any, Any, Any]:
    """The weights of a tile after dropout, the gradients of the products of queries and keys, and those of the logits,
    which are the gradients of the bias.
    """
    x, derivative = logits(p, refs, entry, i, j, is_masked, is_transposed)
    weights = jnp.exp2(x - align_queries(refs.lse[...], p, is_transposed))
    value, d_out = without_unfilled(refs.value[...], p, refs, entry, j, is_masked), refs.d_out[...]
    d_weights = matmul_transposed(value, d_out) if is_transposed else matmul_transposed(d_out, value)
    after_dropout = weights
    if p.dropout:
        factor = jnp.where(keep_mask(p, entry.seed, head, i, j, is_transposed), 1.0 / (1.0 - p.dropout), 0.0)
        after_dropout, d_weights = weights * factor, d_weights * factor
    d_logits = weights * (d_weights - align_queries(refs.delta[...], p, is_transposed))
    d_products = d_logits if derivative is None else d_logits * derivative
    return after_dropout, d_products, d_logits
