"""One launch that reduces tiles of logits, and what plain JAX makes of the parts."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_ops.fused_linear_cross_entropy.definition import Statistics, labels_of, rows, vocab
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability, multiprocessors

from ._tiling import ROWS, Config

#: The columns of the hidden states that a step multiplies: of 16 bits, 128 bytes. And the rows of a group of warps.
DEPTH, HALF = 64, ROWS // 2
#: In place of the column of a label that is not here.
ELSEWHERE = -1
#: A result that a call does not have.
ABSENT = jax.ShapeDtypeStruct((1,), jnp.float32)


class Rows(NamedTuple):
    """What the losses of rows are made of, each (rows,) in float32."""

    softmax: Statistics
    #: The logit of the label; 0 where it is not a column of this weight.
    own: jax.Array
    #: The mean over the logits of what the largest one is above each.
    mean_above: jax.Array | None
    #: The sum of p times what each logit is above the largest one.
    mean_product: jax.Array | None


def losses(inv: Invocation, cfg: Config) -> dict[str, jax.Array]:
    """The loss of each row, without its weight, and the lse: by the definition, without logits."""
    smoothing, z_loss, labels = inv["label_smoothing"], inv["z_loss"], labels_of(inv)
    numbers = of_rows(inv, cfg, has_smoothing=smoothing > 0)
    log_sum, lse = numbers.softmax.log_sum, numbers.softmax.lse
    # Differences of logits first: the lse of large logits has too few digits.
    loss = log_sum + (numbers.softmax.top - numbers.own)
    if numbers.mean_above is not None:
        loss = (1 - smoothing) * loss + smoothing * (log_sum + numbers.mean_above)
    if z_loss:
        loss = loss + z_loss * jnp.square(lse)
    return {"losses": jnp.where(labels.counts, loss, 0), "lse": lse}


def of_rows(inv: Invocation, cfg: Config, *, has_smoothing: bool = False, has_entropy: bool = False) -> Rows:
    """The numbers of all rows, from those of each tile of words, added up in the order of the words."""
    labels = labels_of(inv)
    tops, totals, sums, own = _launched(
        inv, cfg, jnp.where(labels.is_here, labels.column, ELSEWHERE), has_smoothing, has_entropy
    )
    top = _finite(tops.max(0))
    factors = jnp.exp(tops - top)  # of a tile without words that can be: 0
    total = (factors * totals).sum(0)
    mean_above = mean_product = None
    if has_smoothing:
        words = jnp.minimum(vocab(inv) - cfg.columns * jnp.arange(len(tops)), cfg.columns)
        mean_above = (sums + words[:, None] * (top - _finite(tops))).sum(0) / vocab(inv)
    if has_entropy:
        products = factors * (sums + totals * _finite(tops - top))
        mean_product = products.sum(0) / jnp.where(total == 0, 1, total)
    return Rows(Statistics(top, total), jnp.where(labels.is_here, own, 0), mean_above, mean_product)


def _finite(logits: jax.Array) -> jax.Array:
    """0 in place of what is not finite."""
    return jnp.where(jnp.isfinite(logits), logits, 0)


def _launched(
    inv: Invocation, cfg: Config, columns: jax.Array, has_smoothing: bool, has_entropy: bool
) -> tuple[jax.Array, ...]:
    hidden, weight, bias, transposed = inv["hidden"], inv["weight"], inv["bias"], inv["transpose_weight"]
    count, dim, size = rows(inv), hidden.shape[-1], vocab(inv)
    column_tiles = -(-size // cfg.columns)
    parts = jax.ShapeDtypeStruct((column_tiles, count), jnp.float32)
    return _jax_triton.call(
        "ejkernel_triton.fused_linear_cross_entropy_sm90._device:reduce_logits",
        [
            _jax_triton.describe(hidden.reshape(count, dim), (HALF, DEPTH)),
            _jax_triton.describe(weight, (cfg.columns, DEPTH) if transposed else (DEPTH, cfg.columns)),
            columns,
            columns if bias is None else bias,
        ],
        (parts, parts, parts if has_smoothing or has_entropy else ABSENT, jax.ShapeDtypeStruct((count,), jnp.float32)),
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
            "STAGES": cfg.stages,
            "BAND": cfg.band,
        },
        num_warps=4,
        num_stages=1,
        compute_capability=capability(inv),
        name=f"{inv.op}_sm90",
    )
