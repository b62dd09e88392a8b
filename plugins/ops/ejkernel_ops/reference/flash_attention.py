"""Attention as its definition says it, densely: what every other kernel is measured against, and the last resort."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.attention.dropout import keep_mask
from ejkernel_ops.attention.forward import lse_dtype
from ejkernel_ops.attention.tokens import band, tokens, visible

#: After everything else, on every platform.
PLATFORMS = {"cpu": 0, "gpu": 0, "tpu": 0}


@attrs.frozen
class Config:
    """Nothing to choose."""


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    return Config()


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array]:
    return dense_attention(inv)


def dense_attention(arguments: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    """(out, lse) from prepared arguments, through the whole (batch, heads, length, length) matrix of scores.

    Plain JAX with finite derivatives of every order, also where a row has nothing to attend to.
    """
    dtype = lse_dtype(arguments["query"].dtype)
    logits = _logits(arguments, dtype)  # (batch, kv heads, group, queries, keys)
    seen = _seen(arguments, logits.shape)
    sinks = arguments["softmax_aux"]
    if sinks is not None:
        kv_heads, group = logits.shape[1:3]
        sinks = sinks.astype(dtype).reshape(1, kv_heads, group, 1, -1)
    weights, lse = _softmax(logits, seen, sinks)
    weights = _dropped(arguments, weights)
    out = jnp.einsum("bhgqk,bkhd->bqhgd", weights, arguments["value"].astype(dtype), precision="highest")
    batch, length, heads, _ = arguments["query"].shape
    return (
        out.reshape(batch, length, heads, arguments["value"].shape[3]).astype(arguments["value"].dtype),
        lse.reshape(batch, heads, length),
    )


def _logits(arguments: Mapping[str, Any], dtype: Any) -> jax.Array:
    query, key, bias = arguments["query"], arguments["key"], arguments["bias"]
    batch, length, heads, dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.astype(dtype).reshape(batch, length, kv_heads, heads // kv_heads, dim)
    logits = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, key.astype(dtype), precision="highest")
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
    return array.reshape(batch, 1, 1, *rest) if heads == 1 else array.reshape(batch, kv_heads, -1, *rest)


def _seen(arguments: Mapping[str, Any], shape: tuple[int, ...]) -> jax.Array | None:
    where = tokens(arguments)
    left, right = band(arguments["causal"], arguments["sliding_window"])
    seen = visible(where.q_position, where.k_position, where.groups, left, right)
    if seen is not None:
        seen = seen[:, None, None]
    mask = arguments["attention_mask"]
    if mask is not None:
        mask = _by_kv_head(mask, shape[1])
        seen = mask if seen is None else seen & mask
    return seen if seen is None else jnp.broadcast_to(seen, shape)


def _softmax(logits: jax.Array, seen: jax.Array | None, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Weights and log-sum-exp of each row; what is not seen, or -inf, weighs nothing."""
    finite = logits != -jnp.inf  # a NaN goes on to the result
    seen = finite if seen is None else seen & finite
    # Twice ``where``: what is masked must neither reach exp nor send a gradient back, not even 0 * inf.
    safe = jnp.where(seen, logits, 0)
    peak = jnp.max(jnp.where(seen, logits, -jnp.inf), axis=-1, keepdims=True, initial=-jnp.inf)
    if sinks is not None:
        peak = jnp.maximum(peak, jnp.max(sinks, axis=-1, keepdims=True))
    peak = jax.lax.stop_gradient(jnp.where(peak != -jnp.inf, peak, 0))
    exponentials = jnp.where(seen, jnp.exp(jnp.where(seen, safe - peak, 0)), 0)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.sum(jnp.exp(sinks - peak), axis=-1, keepdims=True)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    lse = jnp.where(empty, -jnp.inf, jnp.log(total) + peak)
    return exponentials / total, lse


def _dropped(arguments: Mapping[str, Any], weights: jax.Array) -> jax.Array:
    probability = arguments["dropout_prob"]
    if probability == 0:
        return weights
    batch, kv_heads, group, q_length, k_length = weights.shape
    rows = jnp.arange(batch * kv_heads * group).reshape(batch, kv_heads, group, 1, 1)
    keep = keep_mask(arguments["dropout_seed"], probability, rows, jnp.arange(q_length)[:, None], jnp.arange(k_length))
    return jnp.where(keep, weights / (1 - probability), 0)
