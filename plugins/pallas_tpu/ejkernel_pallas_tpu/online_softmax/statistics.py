"""A softmax of logits that arrive tile by tile: of each row the maximum so far, and the sum of its weights relative
to it.

Both are references to arrays of (rows, lanes), the same in every lane. Logits are in units of log2.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_ops.flash_attention.statistics import LOG2E
from ejkernel_pallas_tpu.online_softmax.products import widen

#: Where the maximum of a row starts: below every finite logit, and not -inf, because -inf - -inf is NaN.
LOWEST = -3.4028234663852886e38
#: Lower finite biases and sinks are read as this number, so that they are finite in base 2, too: a row in which every
#: logit has the lowest bias, which many use as a mask, still has weights. A power of two, which bfloat16 has.
LEAST = -(2.0**126)


def weigh(x: Any, row_max: Any, row_sum: Any) -> tuple[Any, Any]:
    """The weights of a tile of logits, and the factor of all sums so far: they are relative to a maximum that has
    changed.
    """
    old_max = row_max[...]
    new_max = jnp.maximum(old_max, jnp.max(x, axis=1, keepdims=True))
    correction = jnp.exp2(old_max - new_max)
    weights = jnp.exp2(x - widen(new_max, x.shape[1]))
    row_sum[...] = row_sum[...] * correction + jnp.sum(weights, axis=1, keepdims=True)
    row_max[...] = new_max
    return weights, correction


def divisors(row_sum: Any) -> tuple[Any, Any]:
    """Which rows see a key, and the sums of their weights: 1 in the place of 0 for a row that sees nothing."""
    total = row_sum[...]
    has_keys = total > 0.0
    return has_keys, jnp.where(has_keys, total, 1.0)


def natural_lse(row_max: Any, divisor: Any) -> Any:
    """The logarithm, to the base e, of the sum of the exponentials of a row."""
    return (row_max[...] + jnp.log2(divisor)) * (1.0 / LOG2E)


def sink_statistics(sinks: jax.Array) -> jax.Array:
    """Of the sinks, (heads, n), two numbers for each head: the greatest one in base 2, and the sum of the exponentials
    of all, less the greatest one. They are not added: far from 0 the sum would be rounded off.
    """
    x = at_least(sinks.astype(jnp.float32))
    greatest = jnp.maximum(x.max(1, keepdims=True, initial=-jnp.inf), LEAST)
    return jnp.concatenate([greatest * LOG2E, jnp.exp(x - greatest).sum(1, keepdims=True)], axis=1)


def at_least(logits: jax.Array) -> jax.Array:
    """Biases or sinks, the finite ones no lower than LEAST."""
    if jnp.finfo(logits.dtype).min > LEAST:
        return logits
    return jnp.where(logits == -jnp.inf, logits, jnp.maximum(logits, LEAST))
