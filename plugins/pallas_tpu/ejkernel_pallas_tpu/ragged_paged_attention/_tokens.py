"""Queries as tiles, and results as tokens again.

XLA gathers the queries of a tile, which brings the heads of a group together at the same time: a tile may begin at any
token, and a kernel would have to copy each of its tokens, and transpose them. Queries are small beside the pages.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_ops.flash_attention.geometry import pad_to

from ._plan import Plan
from ._sizes import Sizes


def to_tiles(query: jax.Array, s: Sizes, plan: Plan) -> jax.Array:
    """(tokens, heads, dim) as (tiles, key heads, rows, dim). Rows behind a sequence are of any token."""
    token = jnp.minimum(_tokens(s, plan), query.shape[0] - 1)
    x = query[token].reshape(plan.count, s.q_tile, s.kv_heads, s.group, s.dim)
    return rows(x.transpose(0, 2, 3, 1, 4), s).astype(s.dtype)


def rows(x: jax.Array, s: Sizes) -> jax.Array:
    """(..., group, tokens, width) as (..., rows, width), with padding."""
    *outer, _, _, width = x.shape
    x = x.reshape(*outer, s.group * s.q_tile, width)
    padded: jax.Array = pad_to(x, x.ndim - 2, s.rows)
    return padded


def to_tokens(x: jax.Array, s: Sizes, plan: Plan, tokens: int, fill: float) -> jax.Array:
    """(tiles, key heads, rows, width) as (tokens, heads, width); tokens of no tile have this number."""
    width = x.shape[-1]
    x = x[:, :, : s.group * s.q_tile].reshape(plan.count, s.kv_heads, s.group, s.q_tile, width)
    x = x.transpose(0, 3, 1, 2, 4).reshape(plan.count * s.q_tile, s.kv_heads * s.group, width)
    place = _places(s, plan, tokens)
    return jnp.where((place >= 0)[:, None, None], x[jnp.maximum(place, 0)], jnp.asarray(fill, x.dtype))


def _tokens(s: Sizes, plan: Plan) -> jax.Array:
    """(tiles, tokens of a tile)."""
    return plan.first_token[:, None] + jnp.arange(s.q_tile, dtype=jnp.int32)


def _places(s: Sizes, plan: Plan, tokens: int) -> jax.Array:
    """Where each token is among those of the tiles, or -1."""
    is_own = jnp.arange(s.q_tile) < plan.tiles.queries[:, None]
    is_own &= plan.tiles.sequence[:, None] >= 0
    token: Any = jnp.where(is_own, _tokens(s, plan), tokens).reshape(-1)
    return jnp.full(tokens, -1, jnp.int32).at[token].set(jnp.arange(token.size, dtype=jnp.int32), mode="drop")
