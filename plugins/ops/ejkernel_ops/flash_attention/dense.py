"""Attention as its definition says it: dense, in plain JAX, with finite derivatives of every order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .dropout import keep_mask
from .tokens import Tokens, band, tokens, visible

Arguments = Mapping[str, Any]


def dense_attention(arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    """(out, lse) from prepared arguments, through the whole (batch, heads, length, length) matrix of scores."""
    arrays = {name: value for name, value in arguments.items() if isinstance(value, jax.Array)}

    def every(arrays: Arguments) -> tuple[jax.Array, jax.Array]:
        given = {**arguments, **arrays}
        return attend(given, tokens(given), jnp.arange(given["query"].shape[1], dtype=jnp.uint32))

    mesh = _explicit_mesh(arrays.values())
    if mesh is None:
        return every(arrays)
    # Where shardings are part of types, each step would have to say how its result is sharded, and cannot where scores
    # have queries and keys over the same devices. The results say it, and XLA finds out about the rest.
    batch, length, heads, _ = (*jax.typeof(arrays["query"]).sharding.spec, *(None,) * 4)[:4]
    specs = PartitionSpec(batch, length, heads, None), PartitionSpec(batch, heads, length)
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    computed = jax.sharding.auto_axes(every, axes=mesh.explicit_axes, out_sharding=shardings)(arrays)
    return computed[0], computed[1]


def statistics_dtype(arguments: Arguments) -> Any:
    """Statistics and sums are float32, and float64 for float64 inputs."""
    return np.promote_types(arguments["query"].dtype, np.float32)


def _explicit_mesh(arrays: Iterable[jax.Array]) -> Any:
    """The mesh that the arrays' types are of, if it has explicit axes."""
    meshes = (jax.typeof(array).sharding.mesh for array in arrays)
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def attend(arguments: Arguments, where: Tokens, q_index: Any) -> tuple[jax.Array, jax.Array]:
    """The same for some of a call's queries: ``arguments`` has the rows of these alone, ``where`` their coordinates,
    and ``q_index`` their places in the whole call.
    """
    dtype = statistics_dtype(arguments)
    logits = _logits(arguments, dtype)  # (batch, kv heads, group, queries, keys)
    seen = _seen(arguments, where, logits.shape)
    sinks = arguments["softmax_aux"]
    if sinks is not None:
        heads, count = sinks.shape
        sinks = sinks.astype(dtype).reshape(1, *logits.shape[1:3], 1, count)
    weights, lse = _softmax(logits, seen, sinks)
    weights = _dropped(arguments, weights, q_index)
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
    return array.reshape(batch, *((1, 1) if heads == 1 else (kv_heads, heads // kv_heads)), *rest)


def _seen(arguments: Arguments, where: Tokens, shape: tuple[int, ...]) -> jax.Array | None:
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
        peak = jnp.maximum(peak, jnp.max(sinks, axis=-1, keepdims=True, initial=-jnp.inf))
    peak = jax.lax.stop_gradient(jnp.where(peak != -jnp.inf, peak, 0))
    exponentials = jnp.where(seen, jnp.exp(jnp.where(seen, safe - peak, 0)), 0)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.sum(jnp.exp(sinks - peak), axis=-1, keepdims=True)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    lse = jnp.where(empty, -jnp.inf, jnp.log(total) + peak)
    return exponentials / total, lse


def _dropped(arguments: Arguments, weights: jax.Array, q_index: Any) -> jax.Array:
    probability = arguments["dropout_prob"]
    if probability == 0:
        return weights
    batch, kv_heads, group, _, k_length = weights.shape
    rows = jnp.arange(batch * kv_heads * group).reshape(batch, kv_heads, group, 1, 1)
    queries, keys = q_index.reshape(1, 1, 1, -1, 1), jnp.arange(k_length).reshape(1, 1, 1, 1, k_length)
    keep = keep_mask(arguments["dropout_seed"], probability, rows, queries, keys)
    return jnp.where(keep, weights / (1 - probability), 0)
