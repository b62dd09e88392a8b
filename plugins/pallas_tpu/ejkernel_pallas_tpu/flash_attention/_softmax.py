"""A softmax of logits that arrive tile by tile: of each row the maximum so far, and the sum of its weights relative
to it.

Both are references to arrays of (rows, lanes), the same in every lane. Logits are in units of log2.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel_ops.flash_attention.statistics import LOG2E
from ejkernel_pallas_tpu.flash_attention._tile import widen


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
