"""The loss of each row from its statistics: the definition, without logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_ops.fused_linear_cross_entropy.definition import Labels
from ejkernel_pallas_tpu.fused_linear_cross_entropy._statistics import RowStatistics


def losses(rows: RowStatistics, labels: Labels, arguments: Mapping[str, Any]) -> jax.Array:
    """The loss of each row, without its weight; 0 where the label is ignored."""
    smoothing, z_loss = arguments["label_smoothing"], arguments["z_loss"]
    log_sum = rows.softmax.log_sum
    # Differences of logits first: the lse of large logits has too few digits.
    loss = log_sum + (rows.softmax.top - rows.own)
    if smoothing:
        assert rows.mean_below is not None
        loss = (1 - smoothing) * loss + smoothing * (log_sum + rows.mean_below)
    if z_loss:
        loss = loss + z_loss * jnp.square(rows.softmax.lse)
    return jnp.where(labels.counts, loss, 0)
