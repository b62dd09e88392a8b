"""Attention by its definition: dense, in plain JAX, with finite derivatives of every order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .dropout import keep_mask
from .positions import without_unfilled
from .statistics import statistics_dtype
from .tokens import Tokens, band, tokens, visible

Arguments = Mapping[str, Any]


def dense_attention(arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    """(out, lse) from prepared arguments, through the whole (batch, heads, length, length) matrix of scores."""
    q_index = jnp.arange(arguments["query"].shape[1], dtype=jnp.uint32)
    return attend(arguments, tokens(arguments), q_index)


def attend(arguments: Arguments, coordinates: Tokens, q_index: Any) -> tuple[jax.Array, jax.Array]:
    """`dense_attention` for some queries of a call. ``arguments`` has only their rows; ``q_index`` are their indices in
    the whole call.
    """
    arguments, dtype = without_unfilled(arguments), statistics_dtype(arguments)
    logits = _logits(arguments, dtype)  # (batch, kv heads, group, queries, keys)
    mask = _mask(arguments, coordinates, logits.shape)
    sinks = arguments["softmax_aux"]
    if sinks is not None:
        heads, count = sinks.shape
        sinks = sinks.astype(dtype).reshape(1, *logits.shape[1:3], 1, count)
    weights, lse = _softmax(logits, mask, sinks)
    weights = _drop(arguments, weights, q_index)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, arguments["value"].astype(dtype), precision="highest")
    batch, length, heads, _ = arguments["query"].shape
    return (
        out.reshape(batch, length, heads, arguments["value"].shape[3]).astype(arguments["value"].dtype),
        lse.reshape(batch, heads, length),
    )


def _logits(arguments: Arguments, dtype: Any) -> jax.Array:
    query, key, bias = arguments["query"], arguments["key"], arguments["bias"]
    batch, length, heads, dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.astype(dtype).reshape(batch, length, kv_heads, heads // kv_heads, dim)
    logits: jax.Array = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, key.astype(dtype), precision="highest")
    logits = logits * arguments["softmax_scale"]
    cap = arguments["logits_soft_cap"]
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    if bias is not None:
        logits = logits + _by_kv_head(bias.astype(dtype), kv_heads)
    return logits


def _by_kv_head(array: jax.Array, kv_heads: int) -> jax.Array:
    """(batch, heads or 1, queries, keys) to (batch, kv heads or 1, group or 1, queries, keys)."""
    batch, heads, *rest = array.shape
    return array.reshape(batch, *((1, 1) if heads == 1 else (kv_heads, heads // kv_heads)), *rest)


def _mask(arguments: Arguments, coordinates: Tokens, shape: tuple[int, ...]) -> jax.Array | None:
    left, right = band(arguments["causal"], arguments["sliding_window"])
    mask = visible(coordinates.q_position, coordinates.k_position, coordinates.groups, left, right)
    if mask is not None:
        mask = mask[:, None, None]
    attention_mask = arguments["attention_mask"]
    if attention_mask is not None:
        attention_mask = _by_kv_head(attention_mask, shape[1])
        mask = attention_mask if mask is None else mask & attention_mask
    return mask if mask is None else jnp.broadcast_to(mask, shape)


def _softmax(logits: jax.Array, mask: jax.Array | None, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The weights and the lse of each row; masked logits and -inf have a weight of 0."""
    is_counted = logits != -jnp.inf  # a NaN is counted, and reaches the result
    is_counted = is_counted if mask is None else mask & is_counted
    # With two ``where``s, masked logits neither reach exp nor get a gradient, not even 0 * inf.
    safe = jnp.where(is_counted, logits, 0)
    peak = jnp.max(jnp.where(is_counted, logits, -jnp.inf), axis=-1, keepdims=True, initial=-jnp.inf)
    if sinks is not None:
        peak = jnp.maximum(peak, jnp.max(sinks, axis=-1, keepdims=True, initial=-jnp.inf))
    peak = jax.lax.stop_gradient(jnp.where(peak != -jnp.inf, peak, 0))
    exponentials = jnp.where(is_counted, jnp.exp(jnp.where(is_counted, safe - peak, 0)), 0)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.sum(jnp.exp(sinks - peak), axis=-1, keepdims=True)
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    lse = jnp.where(is_empty, -jnp.inf, jnp.log(total) + peak)
    return exponentials / total, lse


def _drop(arguments: Arguments, weights: jax.Array, q_index: Any) -> jax.Array:
    probability = arguments["dropout_prob"]
    if probability == 0:
        return weights
    batch, kv_heads, group, _, k_length = weights.shape
    rows = jnp.arange(batch * kv_heads * group).reshape(batch, kv_heads, group, 1, 1)
    queries, keys = q_index.reshape(1, 1, 1, -1, 1), jnp.arange(k_length).reshape(1, 1, 1, 1, k_length)
    is_kept = keep_mask(arguments["dropout_seed"], probability, rows, queries, keys)
    return jnp.where(is_kept, weights / (1 - probability), 0)
