"""Log-probabilities and entropies in plain JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_ops.fused_linear_cross_entropy.definition import (
    Labels,
    Statistics,
    before_cap,
    labels_of,
    logits_of,
    probabilities,
    statistics_of,
)

Arguments = Mapping[str, Any]


def divided(logits: jax.Array, arguments: Arguments) -> jax.Array:
    """The logits, divided by the temperature."""
    return logits if arguments["temperature"] == 1.0 else logits / arguments["temperature"]


def log_probs(logits: jax.Array, statistics: Statistics, labels: Labels) -> jax.Array:
    """The log-probability of the label of each row."""
    own = jnp.take_along_axis(logits, labels.column[:, None], 1)[:, 0]
    value = (jnp.where(labels.is_here, own, 0) - statistics.top) - statistics.log_sum
    return jnp.where(labels.counts, value, 0)


def entropies(logits: jax.Array, statistics: Statistics, labels: Labels) -> jax.Array:
    """The entropy of each row. A word that cannot be adds nothing."""
    values = jnp.where(logits == -jnp.inf, 0, logits - statistics.top[:, None])
    mean = (probabilities(logits, statistics) * values).sum(-1)
    return jnp.where(labels.counts, statistics.log_sum - mean, 0)


def d_logits(
    logits: jax.Array,
    statistics: Statistics,
    labels: Labels,
    d_log_probs: jax.Array | None,
    d_entropy: jax.Array | None,
    arguments: Arguments,
) -> jax.Array:
    """The gradient of the logits before the cap, from the cotangents of what each row gives. ``logits`` are divided by
    the temperature.
    """
    p = probabilities(logits, statistics)
    gradient = jnp.zeros_like(p)
    if d_log_probs is not None:
        columns = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        is_label = (columns == labels.column[:, None]) & labels.is_here[:, None]
        gradient = gradient + (is_label - p) * d_log_probs[:, None]
    if d_entropy is not None:
        values = jnp.where(logits == -jnp.inf, 0, logits - statistics.top[:, None])
        of_mean = values - (p * values).sum(-1, keepdims=True)
        gradient = gradient - p * of_mean * d_entropy[:, None]
    temperature = arguments["temperature"]
    gradient = before_cap(gradient / temperature, logits * temperature, arguments)
    return jnp.where(labels.counts[:, None], gradient, 0)


def forward(arguments: Arguments) -> tuple[jax.Array, jax.Array]:
    """The log-probability of the label of each row, and the entropy."""
    hidden, labels = arguments["hidden"].reshape(-1, arguments["hidden"].shape[-1]), labels_of(arguments)
    clean = jnp.where(labels.counts[:, None], hidden, 0)
    logits = divided(logits_of(clean, arguments, precise=True), arguments)
    statistics, shape = statistics_of(logits), arguments["labels"].shape
    values = log_probs(logits, statistics, labels), entropies(logits, statistics, labels)
    return values[0].reshape(shape), values[1].reshape(shape)
