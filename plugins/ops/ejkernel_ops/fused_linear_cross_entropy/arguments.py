"""The arguments of the loss: checked, in the form that kernels see."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops.arrays import check_floats, check_integers
from ejkernel_ops.attention_options import flag, soft_cap
from ejkernel_ops.options import brief, finite, type_and_value
from ejkernel_ops.pages import int32

Arguments = dict[str, Any]
Restore = Callable[[tuple[Any, ...]], Any]

#: What ``reduction`` takes where the rows are added up.
REDUCTIONS = ("mean", "sum")


def prepare(arguments: Arguments) -> tuple[Arguments, Restore]:
    """Check the arguments of the loss of each row."""
    return _with_results(arguments, _checked(arguments))


def prepare_sum(arguments: Arguments) -> tuple[Arguments, Restore]:
    """Check the arguments of the loss of all rows. A mean is a sum whose weights have the factor in them."""
    canonical, reduction = _checked(arguments), arguments["reduction"]
    if not (isinstance(reduction, str) and reduction in REDUCTIONS):
        raise ValueError(f"reduction: takes 'mean' or 'sum'; got {brief(reduction)}")
    if reduction == "mean":
        canonical["token_weights"] = mean_weights(canonical)
    return _with_results(arguments, canonical | {"reduction": "sum"})


def _with_results(arguments: Arguments, canonical: Arguments) -> tuple[Arguments, Restore]:
    """Callers get the loss, and the lse if they want it. Kernels are not told: they know which results are needed."""
    has_lse = flag("return_lse", arguments["return_lse"])
    return canonical | {"return_lse": False}, lambda results: tuple(results[:2]) if has_lse else results[0]


def counted(arguments: Arguments) -> Any:
    """Which labels are not ignored."""
    return arguments["labels"] != arguments["ignore_index"]


def mean_weights(arguments: Arguments) -> jax.Array:
    """The weights with which a sum over rows is the mean of those that count."""
    counts, own = counted(arguments), arguments["token_weights"]
    dtype = jnp.promote_types(arguments["hidden"].dtype, jnp.float32)
    weights = jnp.where(counts, 1 if own is None else own.astype(dtype), 0).astype(dtype)
    total = weights.sum()
    # Without weights the total is a count. Where it is 0, so is the mean.
    return weights * jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))


# -- checks ------------------------------------------------------------------------------------------------------------


def _checked(arguments: Arguments) -> Arguments:
    return {**arguments, **product(arguments), **_labels(arguments), **_options(arguments)}


def product(arguments: Arguments) -> Arguments:
    """The checked arguments of the logits."""
    for name in ("hidden", "weight", "bias"):
        if arguments[name] is not None:
            check_floats(name, arguments[name])
    dtype = arguments["hidden"].dtype
    if arguments["weight"].dtype != dtype:
        raise TypeError(f"weight: takes the dtype of hidden, {dtype}; got {arguments['weight'].dtype}")
    return {
        "transpose_weight": flag("transpose_weight", arguments["transpose_weight"]),
        "logits_soft_cap": soft_cap(arguments["logits_soft_cap"], dtype),
    }


def _labels(arguments: Arguments) -> Arguments:
    labels, start, weights = (arguments[name] for name in ("labels", "vocab_start", "token_weights"))
    canonical = {"labels": label_array(labels), "ignore_index": _ignore_index(arguments["ignore_index"])}
    if start is not None:
        check_integers("vocab_start", start)
        if start.shape not in ((1,), ()):
            raise ValueError(f"vocab_start: takes one integer, of shape (1,) or (); got shape {start.shape}")
        canonical["vocab_start"] = start.astype(jnp.int32).reshape(1)
    if weights is not None:
        check_floats("token_weights", weights)
        if weights.shape != labels.shape:
            raise ValueError(f"token_weights: takes the shape of labels, {labels.shape}; got shape {weights.shape}")
    return canonical


def label_array(labels: Any) -> Any:
    """The checked labels in int32. One of more bits that has no logit has none after it, either."""
    check_integers("labels", labels)
    return int32(labels)


def _ignore_index(value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise TypeError(f"ignore_index: takes an int, known while tracing; got {type_and_value(value)}")
    index = int(value)
    if not -(2**31) <= index < 2**31:
        raise ValueError(f"ignore_index: takes a number that int32 holds; got {brief(value)}")
    return index


def _options(arguments: Arguments) -> Arguments:
    dtype = arguments["hidden"].dtype
    options = {name: finite(name, arguments[name], dtype) for name in ("z_loss", "label_smoothing")}
    if options["z_loss"] < 0:
        raise ValueError(f"z_loss: must be at least 0; got {options['z_loss']}")
    if not 0 <= options["label_smoothing"] < 1:
        raise ValueError(f"label_smoothing: takes a number from 0, below 1; got {options['label_smoothing']}")
    return options
