"""``ragged_paged_attention`` in plain JAX, by its definition: one token after another."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, plain_kernel

from . import definition


def _attention(inv: Invocation) -> tuple[jax.Array, jax.Array]:
    token, query = jnp.arange(inv["query"].shape[0]), definition.queries(inv)
    out, lse = jax.lax.map(lambda x: _of_token(inv, *x), (token, query))
    return out.astype(definition.output_dtype(inv)), lse.T


def _of_token(inv: Invocation, token: jax.Array, query: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(heads, dim) to (heads, v_head_dim) and (heads,)."""
    sequence, position, is_there = definition.place_of_token(inv, token)
    length, slot = definition.lengths(inv)[sequence], jnp.arange(definition.most_keys(inv))
    key, value = definition.keys_and_values(inv, inv["block_tables"][sequence], slot)
    # What stands behind the length may be NaN, for which a weight of 0 is not enough.
    key, value = (jnp.where((slot < length)[:, None, None], array, 0) for array in (key, value))
    grouped = query.reshape(key.shape[1], -1, query.shape[1])
    logits = jnp.einsum("kgd,skd->kgs", grouped, key, precision="highest") * inv["softmax_scale"]
    visible = definition.is_visible(inv, position, slot, length)
    logits = jnp.where(visible, definition.capped(inv, logits), -jnp.inf)
    sinks = _sinks(inv, query).reshape(*grouped.shape[:2], -1)
    lse = jax.nn.logsumexp(jnp.concatenate([logits, sinks], -1), axis=-1, keepdims=True)
    weights = jnp.where(visible, jnp.exp(logits - jnp.where(lse == -jnp.inf, 0, lse)), 0)
    out = jnp.einsum("kgs,skd->kgd", weights, value, precision="highest").reshape(query.shape[0], -1)
    return jnp.where(is_there, out, 0), jnp.where(is_there, lse.reshape(-1), -jnp.inf)


def _sinks(inv: Invocation, query: jax.Array) -> jax.Array:
    """(heads, sinks)."""
    sinks = inv["softmax_aux"]
    return jnp.zeros((query.shape[0], 0), query.dtype) if sinks is None else sinks.astype(query.dtype)


forward = plain_kernel(_attention, rank=0, version=1)
