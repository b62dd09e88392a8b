"""The loss in plain JAX: logits, what each row gives, and the products of its gradients.

``row_losses`` is the definition. ``d_logits`` has the derivative of it as a formula, for kernels. Both take logits of
rows ``[rows, vocab]`` in the dtype of the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .axes import GRADIENTS

Arguments = Mapping[str, Any]

#: The label of rows that do not count, where an operation has no argument for it.
IGNORED = -100
#: In float16, gradients of logits are multiplied so that the largest of a row is this one: small probabilities would
#: otherwise be 0.
LARGEST_IN_FLOAT16 = 2.0**14


def arithmetic_dtype(array: Any) -> Any:
    """float32, or float64 for float64."""
    return jnp.promote_types(array.dtype, jnp.float32)


def rows(arguments: Arguments) -> int:
    """The number of rows."""
    return math.prod(arguments["hidden"].shape[:-1])


def vocab(arguments: Arguments) -> int:
    """The number of columns of the logits."""
    size: int = arguments["weight"].shape[0 if arguments["transpose_weight"] else 1]
    return size


# -- labels ------------------------------------------------------------------------------------------------------------


class Labels(NamedTuple):
    """The labels of rows."""

    #: The column of each label, from 0; one that there is, whatever the label.
    column: jax.Array
    #: Whether it is a column of this shard of the vocabulary.
    is_here: jax.Array
    #: Whether the row counts: its label is not ignored.
    counts: jax.Array


def labels_of(arguments: Arguments) -> Labels:
    """The labels of all rows, in one axis."""
    labels = arguments["labels"].reshape(-1)
    counts = labels != arguments.get("ignore_index", IGNORED)
    start = arguments.get("vocab_start")
    column = labels if start is None else labels - start[0]
    is_not_before = labels >= (0 if start is None else start[0])  # the difference of large numbers overflows
    is_here = counts & is_not_before & (column >= 0) & (column < vocab(arguments))
    return Labels(jnp.where(is_here, column, 0), is_here, counts)


# -- logits ------------------------------------------------------------------------------------------------------------


def logits_of(hidden: jax.Array, arguments: Arguments, precise: bool = False) -> jax.Array:
    """The logits of rows ``[rows, hidden_dim]``. With ``precise``, the arrays are converted before they are multiplied,
    so that derivatives of any order are as exact.
    """
    weight, bias, cap = arguments["weight"], arguments["bias"], arguments["logits_soft_cap"]
    dtype = arithmetic_dtype(hidden)
    if precise:
        hidden, weight = hidden.astype(dtype), weight.astype(dtype)
    logits = product(hidden, weight, 1, 1 if arguments["transpose_weight"] else 0)
    if bias is not None:
        logits = logits + bias.astype(dtype)
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    return logits


def product(first: jax.Array, second: jax.Array, first_axis: int, second_axis: int) -> jax.Array:
    """The contraction of one axis of two matrices, summed in float32 or wider. float32 is multiplied in full."""
    wide = arithmetic_dtype(first)
    precision = lax.Precision.HIGHEST if first.dtype == wide else lax.Precision.DEFAULT
    contracted = (((first_axis,), (second_axis,)), ((), ()))
    return lax.dot_general(first, second, contracted, precision=precision, preferred_element_type=wide)


# -- rows --------------------------------------------------------------------------------------------------------------


class Statistics(NamedTuple):
    """What the softmax of each row needs: lse is ``top + log_sum``, which differ by orders of magnitude."""

    top: jax.Array
    total: jax.Array

    @property
    def log_sum(self) -> jax.Array:
        return jnp.log(self.total)

    @property
    def lse(self) -> jax.Array:
        return self.top + self.log_sum


def statistics_of(logits: jax.Array) -> Statistics:
    """The largest logit of each row, and the sum of the exponentials relative to it."""
    largest = lax.stop_gradient(logits.max(-1))
    top = jnp.where(jnp.isfinite(largest), largest, 0)
    return Statistics(top, jnp.exp(logits - top[:, None]).sum(-1))


def row_losses(logits: jax.Array, statistics: Statistics, labels: Labels, arguments: Arguments) -> jax.Array:
    """The loss of each row; 0 where the label is ignored."""
    smoothing, z_loss = arguments["label_smoothing"], arguments["z_loss"]
    top, log_sum = statistics.top, statistics.log_sum
    own = jnp.take_along_axis(logits, labels.column[:, None], 1)[:, 0]
    # Differences of logits first: the lse of large logits has too few digits.
    loss = log_sum + (top - jnp.where(labels.is_here, own, 0))
    if smoothing:
        mean = (top[:, None] - logits).mean(-1)
        loss = (1 - smoothing) * loss + smoothing * (log_sum + mean)
    if z_loss:
        loss = loss + z_loss * jnp.square(statistics.lse)
    return jnp.where(labels.counts, loss, 0)


def probabilities(logits: jax.Array, statistics: Statistics) -> jax.Array:
    """The softmax of each row; 0 where all logits are -inf."""
    total = jnp.where(statistics.total == 0, 1, statistics.total)
    return jnp.exp(logits - statistics.top[:, None]) / total[:, None]


def d_logits(
    logits: jax.Array,
    statistics: Statistics,
    labels: Labels,
    d_loss: jax.Array,
    d_lse: jax.Array | None,
    arguments: Arguments,
) -> jax.Array:
    """The gradient of the logits before the cap, from the cotangents of the loss and the lse of each row."""
    gradient = d_capped(probabilities(logits, statistics), statistics.lse, labels, d_loss, d_lse, arguments)
    # What stands in a row without a part in the results does not matter, also NaN.
    return jnp.where(active_rows(labels, d_lse)[:, None], before_cap(gradient, logits, arguments), 0)


def d_capped(
    p: jax.Array,
    lse: jax.Array,
    labels: Labels,
    d_loss: jax.Array,
    d_lse: jax.Array | None,
    arguments: Arguments,
) -> jax.Array:
    """The gradient of the logits after the cap, from the probabilities; of a row without a part in it, anything."""
    smoothing, z_loss = arguments["label_smoothing"], arguments["z_loss"]
    d_loss = jnp.where(labels.counts, d_loss, 0)
    of_lse = d_loss * (1 + 2 * z_loss * lse) if z_loss else d_loss
    of_lse = of_lse if d_lse is None else of_lse + d_lse
    gradient = p * of_lse[:, None]
    columns = lax.broadcasted_iota(jnp.int32, p.shape, 1)
    is_label = (columns == labels.column[:, None]) & labels.is_here[:, None]
    gradient = gradient - jnp.where(is_label, (1 - smoothing) * d_loss[:, None], 0)
    return gradient - (smoothing / p.shape[1]) * d_loss[:, None] if smoothing else gradient


def active_rows(labels: Labels, d_lse: jax.Array | None) -> jax.Array:
    """The rows that have a part in a gradient."""
    return labels.counts if d_lse is None else labels.counts | (d_lse != 0)


def before_cap(gradient: jax.Array, logits: jax.Array, arguments: Arguments) -> jax.Array:
    """The gradient of the logits before the cap, from that of the logits after it."""
    cap = arguments["logits_soft_cap"]
    return gradient if cap is None else gradient * (1 - jnp.square(logits / cap))


# -- the products of the gradients -------------------------------------------------------------------------------------


class Gradients(NamedTuple):
    """The gradients of the arrays of the logits, in the dtype of the arithmetic; None for those that are not needed."""

    hidden: jax.Array | None = None
    weight: jax.Array | None = None
    bias: jax.Array | None = None


def products(
    gradient: jax.Array, hidden: jax.Array, arguments: Arguments, is_active: jax.Array, needs: Mapping[str, bool]
) -> Gradients:
    """The gradients from that of the logits of rows, which is rounded to the dtype of the arrays that it is multiplied
    with. Rows that are not active may hold anything.
    """
    d_bias = gradient.sum(0) if needs["bias"] else None
    matrices = products_of_rounded(*rounded(gradient, hidden.dtype), hidden, arguments, is_active, needs)
    return matrices._replace(bias=d_bias)


def products_of_rounded(
    narrow: jax.Array,
    scale: jax.Array | None,
    hidden: jax.Array,
    arguments: Arguments,
    is_active: jax.Array,
    needs: Mapping[str, bool],
) -> Gradients:
    """The gradients of the matrices, from what `rounded` returns."""
    weight, is_transposed = arguments["weight"], arguments["transpose_weight"]
    d_hidden = d_weight = None
    if needs["hidden"]:
        d_hidden = product(narrow, weight, 1, 0 if is_transposed else 1)
        d_hidden = d_hidden if scale is None else d_hidden * scale
    if needs["weight"]:
        own, largest = jnp.where(is_active[:, None], hidden, jnp.zeros((), hidden.dtype)), None
        if scale is not None:  # that of each row goes to the smaller array
            largest = scale.max(initial=0)
            own = (own * (scale / jnp.where(largest == 0, 1, largest))).astype(hidden.dtype)
        d_weight = product(narrow, own, 0, 0) if is_transposed else product(own, narrow, 0, 0)
        d_weight = d_weight if largest is None else d_weight * largest
    return Gradients(d_hidden, d_weight)


def rounded(gradient: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """The gradient of the logits in the dtype in which it is multiplied, and what each row of the product has to be
    multiplied with: only float16 has too small a range.
    """
    if dtype != jnp.float16:
        return gradient.astype(dtype), None
    largest = lax.stop_gradient(jnp.abs(gradient).max(-1, keepdims=True))
    scale = jnp.where(largest == 0, 1, largest) / LARGEST_IN_FLOAT16
    return (gradient / scale).astype(dtype), scale


# -- all rows at once --------------------------------------------------------------------------------------------------


def forward(arguments: Arguments, has_lse: bool | jax.Array = True) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The loss and the lse of each row, and the loss without its weight. ``has_lse`` is whether anything depends on the
    lse of ignored rows, for all of them or for each: else those that are not finite count as zeros.
    """
    hidden, labels = arguments["hidden"].reshape(-1, arguments["hidden"].shape[-1]), labels_of(arguments)
    counts, shape = labels.counts[:, None], arguments["labels"].shape
    # Ignored rows may hold anything, also NaN: they have no part in the loss. Their lse is computed apart.
    logits = logits_of(jnp.where(counts, hidden, 0), arguments, precise=True)
    statistics = statistics_of(logits)
    losses = row_losses(logits, statistics, labels, arguments)
    is_read = jnp.reshape(jnp.asarray(has_lse), (-1, 1)) | jnp.isfinite(hidden).all(-1, keepdims=True)
    ignored = jnp.where(counts | ~is_read, 0, hidden)
    of_ignored = statistics_of(logits_of(ignored, arguments, precise=True))
    lse = jnp.where(labels.counts, statistics.lse, of_ignored.lse)
    weighted = losses * weights_of(arguments, labels)
    return weighted.reshape(shape), lse.reshape(shape), losses.reshape(shape)


def has_lse_of(d_lse: jax.Array | None) -> bool | jax.Array:
    """Whether a gradient depends on the lse of rows. Zeros of a second derivative may stand beside rows of NaN."""
    return False if d_lse is None else d_lse != 0


def sum_forward(arguments: Arguments, has_lse: bool | jax.Array = True) -> tuple[jax.Array, ...]:
    """The sum of the losses, the lse and the losses of the rows, and the gradients of the sum."""
    hidden, labels = arguments["hidden"].reshape(-1, arguments["hidden"].shape[-1]), labels_of(arguments)
    weighted, lse, losses = forward(arguments, has_lse)
    row_weights = weights_of(arguments, labels)
    clean = jnp.where(labels.counts[:, None], hidden, 0)

    def total(before_the_cap: jax.Array) -> jax.Array:
        logits = capped(before_the_cap, arguments)
        return (row_losses(logits, statistics_of(logits), labels, arguments) * row_weights).sum()

    raw = logits_of(clean, {**arguments, "logits_soft_cap": None}, precise=True)
    gradient = jax.grad(total)(raw)
    all_needed = {"hidden": True, "weight": True, "bias": True}
    gradients = products(gradient, clean, arguments, labels.counts, all_needed)
    assert gradients.hidden is not None
    d_hidden = gradients.hidden.reshape(arguments["hidden"].shape)
    return weighted.sum(), lse, losses, d_hidden, gradients.weight, gradients.bias  # type: ignore[return-value]


def weights_of(arguments: Arguments, labels: Labels) -> jax.Array:
    """The weight of each row; 0 where the label is ignored."""
    own, dtype = arguments["token_weights"], arithmetic_dtype(arguments["hidden"])
    weights = jnp.ones(labels.counts.shape, dtype) if own is None else own.reshape(-1).astype(dtype)
    return jnp.where(labels.counts, weights, 0)


def capped(logits: jax.Array, arguments: Arguments) -> jax.Array:
    """The logits after the cap."""
    cap = arguments["logits_soft_cap"]
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def multiples(inv: Arguments) -> tuple[jax.Array, ...]:
    """The gradients of the forward, times the cotangent of the sum: rounded once, here."""
    by_array = {array: inv[result] for result, array in GRADIENTS.items()}
    return tuple((inv["d_loss"] * by_array[name]).astype(_dtype(inv, name)) for name in inv["wrt"])


def _dtype(inv: Arguments, name: str) -> object:
    """The dtype of a gradient: that of its array, or a wider one if it is a partial sum on one device of several."""
    return arithmetic_dtype(inv[name]) if name in (inv["partial_sums"] or ()) else inv[name].dtype
