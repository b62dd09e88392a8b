"""One launch that reduces tiles of logits, and what plain JAX makes of the parts.

For gradients the launch also stores the exponential of each logit of a chunk of rows, relative to the largest logit of
its row in its tile, in bfloat16: 2 bytes a logit, where plain JAX has 6. Times a factor for each row of a tile, which
is known after the launch, these are the probabilities. One that is near 1 is as exact as in float32, because its
exponential is 1: so its difference from 1, the gradient of a label, has digits left.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_ops.fused_linear_cross_entropy import chunks, gradients
from ejkernel_ops.fused_linear_cross_entropy.definition import (
    Gradients,
    Labels,
    Statistics,
    active_rows,
    d_capped,
    products,
    vocab,
)
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability, multiprocessors

from ._tiling import ROWS, Config, has_own_gradients, rows_of_chunk

#: The columns of the hidden states that a step multiplies: of 16 bits, 128 bytes. And the rows of a group of warps.
DEPTH, HALF = 64, ROWS // 2
#: A row of exponentials is a multiple of so many.
PITCH = 8
#: In place of the column of a label that is not here.
ELSEWHERE = -1
#: A result that a call does not have.
ABSENT = jax.ShapeDtypeStruct((1,), jnp.float32)

Arrays = Mapping[str, Any]


class Rows(NamedTuple):
    """What the losses of rows are made of, each (rows,) in float32 if nothing else is said."""

    softmax: Statistics
    #: The logit of the label; 0 where it is not a column of this weight.
    own: jax.Array
    #: The mean over the logits of what the largest one is above each.
    mean_above: jax.Array | None
    #: The sum of p times what each logit is above the largest one.
    mean_product: jax.Array | None
    #: (rows, tiles of words): the exponential of the largest logit of the tile, relative to that of the row.
    factors: jax.Array
    #: (rows, vocab) in bfloat16: the exponentials relative to the largest logit of the tile.
    exponentials: jax.Array | None


def losses(inv: Invocation, cfg: Config) -> dict[str, jax.Array]:
    """The loss of each row, without its weight, and the lse: by the definition, without logits."""
    arrays = chunks.rows_of(inv)
    return _losses_of(
        inv, of_rows(inv, cfg, arrays, has_smoothing=inv["label_smoothing"] > 0), chunks.labels_of(arrays)
    )


def _losses_of(inv: Invocation, numbers: Rows, labels: Labels) -> dict[str, jax.Array]:
    smoothing, z_loss = inv["label_smoothing"], inv["z_loss"]
    log_sum, lse = numbers.softmax.log_sum, numbers.softmax.lse
    # Differences of logits first: the lse of large logits has too few digits.
    loss = log_sum + (numbers.softmax.top - numbers.own)
    if numbers.mean_above is not None:
        loss = (1 - smoothing) * loss + smoothing * (log_sum + numbers.mean_above)
    if z_loss:
        loss = loss + z_loss * jnp.square(lse)
    return {"losses": jnp.where(labels.counts, loss, 0), "lse": lse}


# -- gradients ---------------------------------------------------------------------------------------------------------


def with_gradients(
    inv: Invocation, cfg: Config, cotangents: Mapping[str, Any], needs: Mapping[str, bool], dtype: Any
) -> tuple[dict[str, Any], Gradients]:
    """The losses and the lse of the rows, and the needed gradients: as those of ``gradients``, or by it."""
    if needs["bias"] or not has_own_gradients(inv):  # that of a bias is summed before anything is rounded
        return gradients.with_gradients(inv, chunks.rows_of_memory(inv), cotangents, needs, dtype)
    return gradients.summed(partial(_of_chunk, inv, cfg, needs), inv, rows_of_chunk(inv), cotangents, needs, dtype)


def _of_chunk(
    inv: Invocation, cfg: Config, needs: Mapping[str, bool], arrays: dict[str, Any]
) -> tuple[Gradients, dict[str, Any]]:
    labels, d_lse = chunks.labels_of(arrays), arrays.get("d_lse")
    numbers = of_rows(inv, cfg, arrays, has_smoothing=inv["label_smoothing"] > 0, has_exponentials=True)
    gradient = d_capped(_probabilities(inv, cfg, numbers), numbers.softmax.lse, labels, arrays["d_loss"], d_lse, inv)
    # What stands in a row without a part in the results does not matter, also NaN.
    is_active = active_rows(labels, d_lse)
    gradient = jnp.where(is_active[:, None], gradient, 0)
    return products(gradient, arrays["hidden"], inv, is_active, needs), _losses_of(inv, numbers, labels)


def _probabilities(inv: Invocation, cfg: Config, numbers: Rows) -> jax.Array:
    assert numbers.exponentials is not None
    total = jnp.where(numbers.softmax.total == 0, 1, numbers.softmax.total)
    factors = jnp.repeat(numbers.factors / total[:, None], cfg.columns, axis=1)[:, : vocab(inv)]
    return numbers.exponentials.astype(jnp.float32) * factors


# -- the launch --------------------------------------------------------------------------------------------------------


def of_rows(
    inv: Invocation,
    cfg: Config,
    arrays: Arrays,
    *,
    has_smoothing: bool = False,
    has_entropy: bool = False,
    has_exponentials: bool = False,
) -> Rows:
    """The numbers of the rows of ``arrays``, from those of each tile of words, added up in the order of the words."""
    labels = chunks.labels_of(arrays)
    columns = jnp.where(labels.is_here, labels.column, ELSEWHERE)
    tops, totals, sums, own, exponentials = _launched(
        inv, cfg, arrays["hidden"], columns, has_smoothing, has_entropy, has_exponentials
    )
    top = _finite(tops.max(0))
    factors = jnp.exp(tops - top)  # of a tile without words that can be: 0
    total = (factors * totals).sum(0)
    mean_above = mean_product = None
    if has_smoothing:
        words = jnp.minimum(vocab(inv) - cfg.columns * jnp.arange(len(tops)), cfg.columns)
        mean_above = (sums + words[:, None] * (top - _finite(tops))).sum(0) / vocab(inv)
    if has_entropy:
        of_tiles = factors * (sums + totals * _finite(tops - top))
        mean_product = of_tiles.sum(0) / jnp.where(total == 0, 1, total)
    own = jnp.where(labels.is_here, own, 0)
    stored = exponentials[:, : vocab(inv)] if has_exponentials else None
    return Rows(Statistics(top, total), own, mean_above, mean_product, factors.T, stored)


def _finite(logits: jax.Array) -> jax.Array:
    """0 in place of what is not finite."""
    return jnp.where(jnp.isfinite(logits), logits, 0)


def _launched(
    inv: Invocation,
    cfg: Config,
    hidden: jax.Array,
    columns: jax.Array,
    has_smoothing: bool,
    has_entropy: bool,
    has_exponentials: bool,
) -> tuple[jax.Array, ...]:
    weight, bias, transposed = inv["weight"], inv["bias"], inv["transpose_weight"]
    (count, dim), size = hidden.shape, vocab(inv)
    column_tiles = -(-size // cfg.columns)
    parts = jax.ShapeDtypeStruct((column_tiles, count), jnp.float32)
    of_rows = jax.ShapeDtypeStruct((count,), jnp.float32)
    exponentials = jax.ShapeDtypeStruct((count, -(-size // PITCH) * PITCH), jnp.bfloat16)
    return _jax_triton.call(
        "ejkernel_triton.fused_linear_cross_entropy_sm90._device:reduce_logits",
        [
            _jax_triton.describe(hidden, (HALF, DEPTH)),
            _jax_triton.describe(weight, (cfg.columns, DEPTH) if transposed else (DEPTH, cfg.columns)),
            columns,
            columns if bias is None else bias,
        ],
        (
            parts,
            parts,
            parts if has_smoothing or has_entropy else ABSENT,
            of_rows,
            exponentials if has_exponentials else ABSENT,
        ),
        grid=(min(multiprocessors(inv), column_tiles * -(-count // ROWS)),),
        constants={
            "ROWS": count,
            "DIM": dim,
            "VOCAB": size,
            "COLUMNS": cfg.columns,
            "TRANSPOSED": transposed,
            "BIAS": bias is not None,
            "CAP": float(inv["logits_soft_cap"] or 0.0),
            "SCALE": 1 / float(inv.get("temperature", 1.0)),
            "SMOOTHING": has_smoothing,
            "ENTROPY": has_entropy,
            "STORED": has_exponentials,
            "STAGES": cfg.stages,
            "BAND": cfg.band,
        },
        num_warps=4,
        num_stages=1,
        compute_capability=capability(inv),
        name=f"{inv.op}_sm90",
    )
