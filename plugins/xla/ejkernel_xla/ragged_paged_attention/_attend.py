"""The online softmax of tiles over the blocks of their keys."""

from __future__ import annotations

import attrs
import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_ops.flash_attention.tokens import band
from ejkernel_ops.ragged_paged_attention import definition
from ejkernel_ops.ragged_paged_attention.tiles import tiles

State = tuple[jax.Array, jax.Array, jax.Array]


@attrs.frozen(eq=False)
class Tiles:
    """Some tiles of queries: for each its sequence's table and number of keys, and for each query where it stands."""

    #: (tiles, tokens, kv heads, group, dim)
    queries: jax.Array
    #: (tiles, tokens): positions, and the tokens themselves, behind the last one where a tile has no such query.
    positions: jax.Array
    token: jax.Array
    tables: jax.Array
    lengths: jax.Array


def attention(inv: Invocation, q_tile: int, kv_block: int, together: int) -> tuple[jax.Array, jax.Array]:
    """The output and the lse."""
    (tokens, heads, _), dtype = inv["query"].shape, definition.result_dtype(inv)
    rows = jnp.zeros((tokens, heads, definition.value_dim(inv)), definition.output_dtype(inv))
    statistics = jnp.full((tokens, heads), -jnp.inf, dtype)
    sequence, first_token = tiles(inv, q_tile)
    count = sequence.shape[0]
    if count == 0:
        return rows, statistics.T
    together = min(together, count)
    padded = -(-count // together) * together - count
    groups = (
        jnp.pad(sequence, (0, padded), constant_values=-1).reshape(-1, together),
        jnp.pad(first_token, (0, padded)).reshape(-1, together),
    )
    out, lse, token = jax.lax.map(lambda group: _of_group(inv, group[0], group[1], q_tile, kv_block), groups)
    place = token.reshape(-1)
    rows = rows.at[place].set(out.reshape(-1, *rows.shape[1:]).astype(rows.dtype), mode="drop")
    statistics = statistics.at[place].set(lse.reshape(-1, heads), mode="drop")
    return rows, statistics.T


def _of_group(
    inv: Invocation, sequence: jax.Array, first_token: jax.Array, q_tile: int, kv_block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    group = _tiles(inv, sequence, first_token, q_tile)
    first, end = _seen_blocks(inv, group, kv_block)
    state = jax.lax.fori_loop(first, end, lambda j, state: _step(inv, group, kv_block, j, state), _start(inv, group))
    return *_results(inv, *state), group.token


def _tiles(inv: Invocation, sequence: jax.Array, first_token: jax.Array, q_tile: int) -> Tiles:
    tokens, heads, dim = inv["query"].shape
    own = jnp.maximum(sequence, 0)
    end = jnp.where(sequence < 0, 0, inv["query_start_loc"][1:][own])
    token = first_token[:, None] + jnp.arange(q_tile)
    lengths = jnp.where(sequence < 0, 0, definition.lengths(inv)[own])
    queries = definition.queries(inv).at[token].get(mode="clip")
    kv_heads = definition.kv_heads(inv)
    return Tiles(
        queries.reshape(*token.shape, kv_heads, heads // kv_heads, dim),
        lengths[:, None] - (end[:, None] - token),
        jnp.where(token < jnp.minimum(end, tokens)[:, None], token, tokens),
        inv["block_tables"][own],
        lengths,
    )


def _seen_blocks(inv: Invocation, group: Tiles, kv_block: int) -> tuple[jax.Array, jax.Array]:
    """The first block that any of the tiles sees, and the one behind the last."""
    left, right = band(inv["causal"], inv["sliding_window"])
    is_query, lengths = group.token < inv["query"].shape[0], group.lengths[:, None]
    first = jnp.zeros_like(group.positions) if left is None else group.positions - left
    end = lengths if right is None else jnp.minimum(group.positions + right + 1, lengths)
    first, end = jnp.where(is_query, jnp.maximum(first, 0), 2**30), jnp.where(is_query, end, 0)
    return jnp.min(first) // kv_block, -(-jnp.max(end) // kv_block)


def _start(inv: Invocation, group: Tiles) -> State:
    """The maximum, the sum of the weights, and the weighted values: those of the sinks."""
    tiles, tokens, kv_heads, heads, _ = group.queries.shape
    shape, dtype = (tiles, tokens, kv_heads, heads), group.queries.dtype
    sums = jnp.zeros((*shape, definition.value_dim(inv)), dtype)
    if inv["softmax_aux"] is None:
        return jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype), sums
    sinks = inv["softmax_aux"].astype(dtype).reshape(kv_heads, heads, -1)
    largest = jnp.max(sinks, axis=-1, initial=-jnp.inf)
    total = jnp.exp(sinks - _finite(largest)[..., None]).sum(-1)
    return jnp.broadcast_to(largest, shape), jnp.broadcast_to(total, shape), sums


def _step(inv: Invocation, group: Tiles, kv_block: int, j: jax.Array, state: State) -> State:
    row_max, row_sum, sums = state
    slot = j * kv_block + jnp.arange(kv_block)
    key, value = definition.keys_and_values(inv, group.tables, slot)
    # What stands behind a length may be NaN, for which a weight of 0 is not enough.
    is_filled = (slot < group.lengths[:, None])[..., None, None]
    key, value = jnp.where(is_filled, key, 0), jnp.where(is_filled, value, 0)
    logits = jnp.einsum("nqkgd,nskd->nqkgs", group.queries, key, precision="highest") * inv["softmax_scale"]
    visible = definition.is_visible(inv, group.positions[..., None], slot, group.lengths[:, None, None])
    logits = jnp.where(visible[:, :, None, None], definition.capped(inv, logits), -jnp.inf)
    new_max = jnp.maximum(row_max, logits.max(-1))
    weights, rescale = jnp.exp(logits - _finite(new_max)[..., None]), jnp.exp(row_max - _finite(new_max))
    new_sums = jnp.einsum("nqkgs,nskd->nqkgd", weights, value, precision="highest")
    return new_max, row_sum * rescale + weights.sum(-1), sums * rescale[..., None] + new_sums


def _finite(row_max: jax.Array) -> jax.Array:
    """What logits are subtracted from: without any, 0."""
    return jnp.where(row_max == -jnp.inf, 0, row_max)


def _results(inv: Invocation, row_max: jax.Array, row_sum: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(tiles, tokens, heads, dim) and (tiles, tokens, heads)."""
    out = sums / jnp.where(row_sum > 0, row_sum, 1)[..., None]
    lse = jnp.where(row_sum > 0, _finite(row_max) + jnp.log(row_sum), -jnp.inf)
    shape = (*out.shape[:2], -1)
    return out.reshape(*shape, out.shape[-1]), lse.reshape(shape)
