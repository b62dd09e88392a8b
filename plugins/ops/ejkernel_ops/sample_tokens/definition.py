"""What ``sample_tokens`` computes around its filters, in plain JAX.

Logits are measured from the largest of their row, and divided by the temperature: 0 is the best, and -inf is never
drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .noise import gumbel

Arguments = Mapping[str, Any]


def in_range(logits: jax.Array) -> jax.Array:
    """The logits in the dtype of the arithmetic; inf counts as the largest number, and NaN as -inf."""
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jnp.minimum(jnp.where(jnp.isnan(wide), -jnp.inf, wide), jnp.finfo(wide.dtype).max)


def below_best(logits: jax.Array) -> jax.Array:
    """How far each logit of ``in_range`` is below the largest of its row, from 0 to -inf."""
    best = logits.max(-1, keepdims=True)
    return logits - jnp.where(best == -jnp.inf, 0, best)


def tempered(distances: jax.Array, arguments: Arguments) -> jax.Array:
    """The logits, divided by the temperature. With a temperature of 0 the best are 0, and the others -inf."""
    temperature = arguments["temperature"]
    if temperature is None:
        return distances
    divisor = temperature.astype(distances.dtype)[:, None]
    return jnp.where(distances == 0, 0, distances / divisor)


def least_by_min_p(arguments: Arguments, dtype: Any) -> jax.Array:
    """(rows, 1): the least of the tempered logits that ``min_p`` keeps."""
    return jnp.log(jnp.clip(arguments["min_p"].astype(dtype), 0, 1))[:, None]


def drawn(scaled: jax.Array, is_kept: jax.Array | None, arguments: Arguments) -> jax.Array:
    """The token of each row, among those that are kept; -1 where no logit is finite."""
    key, temperature = arguments["key"], arguments["temperature"]
    noise = gumbel(key, scaled.shape[1], scaled.dtype)
    if temperature is not None:  # then the first of equal logits is taken
        noise = jnp.where(temperature[:, None] == 0, 0, noise)
    sums = scaled + noise
    if is_kept is not None:
        sums = jnp.where(is_kept, sums, -jnp.inf)
    return jnp.where(sums.max(-1) == -jnp.inf, -1, sums.argmax(-1)).astype(jnp.int32)


def log_probabilities(distances: jax.Array, token: jax.Array) -> jax.Array:
    """Of the tokens that were drawn, under the logits as they were given; -inf where none was."""
    own = jnp.take_along_axis(distances, jnp.maximum(token, 0)[:, None], -1)[:, 0]
    return jnp.where(token < 0, -jnp.inf, own - jnp.log(jnp.exp(distances).sum(-1)))
