"""The results of two splits of the keys, from their parts. The order of the sums is that of the splits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel_ops.flash_attention.statistics import LOG2E


def combine(sums: jax.Array, maxima: jax.Array, totals: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The output in float32, (..., width), and the lse, (..., 1), of (splits, ..., width) and twice (splits, ..., 1).

    Sums and totals of a split are relative to its maximum, which is in units of log2. A row that sees nothing has
    totals of 0: its output is 0, and its lse -inf.
    """
    row_max = maxima.max(0)
    weights = jnp.exp2(maxima - row_max)
    total = (weights * totals).sum(0)
    has_keys = total > 0
    divisor = jnp.where(has_keys, total, 1)
    lse = jnp.where(has_keys, (row_max + jnp.log2(divisor)) * (1 / LOG2E), -jnp.inf)
    # Divided as the kernel itself does where there is one split.
    return (weights * sums).sum(0) * jnp.where(has_keys, 1 / divisor, 0), lse
