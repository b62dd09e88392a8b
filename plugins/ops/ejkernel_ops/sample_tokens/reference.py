"""``sample_tokens`` in plain JAX, by a sort of each row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, plain_kernel

from . import definition


def _tokens(inv: Invocation) -> tuple[jax.Array, jax.Array | None]:
    distances = definition.below_best(definition.in_range(inv["logits"]))
    scaled = definition.tempered(distances, inv)
    token = definition.drawn(scaled, scaled >= _least(scaled, inv), inv)
    return token, definition.log_probabilities(distances, token) if inv.needs("logprobs") else None


def _least(scaled: jax.Array, inv: Invocation) -> jax.Array:
    """(rows, 1): the least logit of each row that all filters keep. Equal ones are kept or not together."""
    ordered = -jnp.sort(-scaled, -1)
    place = jnp.arange(scaled.shape[1])
    count = jnp.full(scaled.shape[:1], scaled.shape[1])
    if inv["top_k"] is not None:
        count = jnp.where((inv["top_k"] > 0) & (inv["top_k"] < count), inv["top_k"], count)
    least = _at(ordered, count - 1)
    if inv["top_p"] is not None:
        weights = jnp.where(ordered >= least, jnp.exp(ordered), 0)
        before = jnp.cumsum(weights, -1) - weights
        share = inv["top_p"].astype(scaled.dtype)[:, None]
        is_needed = (before < share * weights.sum(-1, keepdims=True)) | (place == 0) | (share >= 1)
        least = jnp.maximum(least, _at(ordered, is_needed.sum(-1) - 1))
    if inv["min_p"] is not None:
        least = jnp.maximum(least, definition.least_by_min_p(inv, scaled.dtype))
    return least


def _at(ordered: jax.Array, place: jax.Array) -> jax.Array:
    return jnp.take_along_axis(ordered, place[:, None], -1)


forward = plain_kernel(_tokens, rank=0, version=1)
