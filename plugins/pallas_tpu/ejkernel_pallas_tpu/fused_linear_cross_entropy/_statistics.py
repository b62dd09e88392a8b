"""The statistics of the rows of a call, by one pass over their logits."""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_ops.fused_linear_cross_entropy.definition import Labels, Statistics, vocab
from ejkernel_pallas_tpu.fused_linear_cross_entropy import _tuning
from ejkernel_pallas_tpu.fused_linear_cross_entropy._logits import over_logits
from ejkernel_pallas_tpu.fused_linear_cross_entropy._operands import filled_up, in_rows, of_rows
from ejkernel_pallas_tpu.fused_linear_cross_entropy._softmax import Softmax
from ejkernel_pallas_tpu.grouped_matmul._tiles import Tile


@attrs.frozen
class RowStatistics:
    """What the loss of rows is made of, each (rows,) in float32."""

    softmax: Statistics
    #: The logit of the label; 0 where it is not a column of this weight.
    own: jax.Array
    #: Over the logits: the mean of the largest one less each, and the sum of p times each less the largest one.
    mean_below: jax.Array | None
    mean_product: jax.Array | None


def statistics(
    inv: Invocation, tile: Tile, labels: Labels, interpret: Any, *, has_mean: bool = False, has_products: bool = False
) -> RowStatistics:
    """The statistics of all rows. ``interpret`` is that of ``pl.pallas_call``."""
    fold = Softmax(has_mean, has_products, vocab(inv))
    columns = jnp.where(labels.is_here, labels.column, -1).astype(jnp.float32)
    launch = over_logits(filled_up(in_rows(inv), tile), tile, fold, columns)
    (numbers,) = launch((), interpret, _tuning.vmem_limit(inv))
    top, total, own, *further = of_rows(numbers, tile)
    # Where all logits are -inf, their differences to the largest one are not numbers.
    softmax = Statistics(jnp.where(total == 0, 0, top), total)
    mean = further.pop(0) if has_mean else None
    return RowStatistics(softmax, own, mean, further.pop(0) / jnp.where(total == 0, 1, total) if has_products else None)
