"""What each row has for the gradient of its logits: its statistics and its cotangents in a few numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_ops.fused_linear_cross_entropy.definition import Labels, active_rows, vocab, weights_of
from ejkernel_pallas_tpu.fused_linear_cross_entropy._statistics import statistics
from ejkernel_pallas_tpu.grouped_matmul._tiles import Tile


def numbers_of(inv: Invocation, tile: Tile, labels: Labels, interpret: Any) -> dict[str, jax.Array]:
    """The numbers that ``_gradients.NUMBERS`` describes, each (rows,) in float32.

    The statistics are computed again: the lse alone has too few digits where logits are large.
    """
    smoothing, z_loss = inv["label_smoothing"], inv["z_loss"]
    rows = statistics(inv, tile, labels, interpret).softmax
    d_loss = jnp.zeros(labels.column.shape, jnp.float32) if inv["d_loss"] is None else inv["d_loss"].reshape(-1)
    d_loss = jnp.where(labels.counts, d_loss * weights_of(inv, labels), 0)
    d_lse = None if inv["d_lse"] is None else inv["d_lse"].reshape(-1)
    of_lse = d_loss * (1 + 2 * z_loss * rows.lse) if z_loss else d_loss
    of_lse = of_lse if d_lse is None else of_lse + d_lse
    numbers = {
        "top": rows.top,
        "of_exponential": of_lse / jnp.where(rows.total == 0, 1, rows.total),
        "of_label": (1 - smoothing) * d_loss,
        "of_word": smoothing / vocab(inv) * d_loss,
        "label": jnp.where(labels.is_here, labels.column, -1),
    }
    is_active = active_rows(labels, d_lse)
    # What stands in a row without a part may be no number.
    clean = {name: jnp.where(is_active, array, 0).astype(jnp.float32) for name, array in numbers.items()}
    return {**clean, "is_active": is_active.astype(jnp.float32)}
