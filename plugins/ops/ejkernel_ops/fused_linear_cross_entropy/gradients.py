"""Gradients of what rows give, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_ops.fused_linear_cross_entropy import definition
from ejkernel_ops.fused_linear_cross_entropy.definition import Gradients, arithmetic_dtype, vocab

from . import chunks

Arguments = Mapping[str, Any]
Arrays = dict[str, Any]
#: From the logits of a chunk and its arrays: the gradient of the logits before the cap, the rows that have a part in
#: it, and what the rows give.
OfChunk = Callable[[jax.Array, Arrays], tuple[jax.Array, jax.Array, Arrays]]
#: From the arrays of a chunk: its part of the gradients, and what the rows give.
Products = Callable[[Arrays], tuple[Gradients, Arrays]]


def with_gradients(
    arguments: Arguments, most_rows: int, cotangents: Mapping[str, Any], needs: Mapping[str, bool], dtype: Any
) -> tuple[Arrays, Gradients]:
    """The loss and the lse of each row, and the needed gradients. ``cotangents`` has those of each row: "d_loss", and
    "d_lse" if there is one. The gradient of the hidden states has this dtype, sums over rows that of the arithmetic.
    """
    return over_rows(partial(_of_losses, arguments), arguments, most_rows, cotangents, needs, dtype)


def _of_losses(arguments: Arguments, logits: jax.Array, arrays: Arrays) -> tuple[jax.Array, jax.Array, Arrays]:
    labels, d_lse = chunks.labels_of(arrays), arrays.get("d_lse")
    statistics = definition.statistics_of(logits)
    gradient = definition.d_logits(logits, statistics, labels, arrays["d_loss"], d_lse, arguments)
    losses = definition.row_losses(logits, statistics, labels, arguments)
    return gradient, definition.active_rows(labels, d_lse), {"losses": losses, "lse": statistics.lse}


def over_rows(
    of_chunk: OfChunk,
    arguments: Arguments,
    most_rows: int,
    row_arrays: Mapping[str, Any],
    needs: Mapping[str, bool],
    dtype: Any,
) -> tuple[Arrays, Gradients]:
    """What rows give, and the needed gradients, by a function of the logits of a chunk, the labels and other arrays of
    its rows.
    """

    def products(arrays: Arrays) -> tuple[Gradients, Arrays]:
        gradient, is_active, rows = of_chunk(definition.logits_of(arrays["hidden"], arguments), arrays)
        return definition.products(gradient, arrays["hidden"], arguments, is_active, needs), rows

    return summed(products, arguments, most_rows, row_arrays, needs, dtype)


def summed(
    products: Products,
    arguments: Arguments,
    most_rows: int,
    row_arrays: Mapping[str, Any],
    needs: Mapping[str, bool],
    dtype: Any,
) -> tuple[Arrays, Gradients]:
    """What rows give, and the needed gradients, by a function of the arrays of a chunk."""

    def step(sums: Gradients, arrays: Arrays) -> tuple[Gradients, Arrays]:
        parts, rows = products(arrays)
        if parts.hidden is not None:
            rows["hidden"] = parts.hidden.astype(dtype)
        return Gradients(None, _plus(sums.weight, parts.weight), _plus(sums.bias, parts.bias)), rows

    arrays = chunks.rows_of(arguments) | dict(row_arrays)
    sums, rows = chunks.over_chunks(step, _zeros(arguments, needs), arrays, most_rows)
    d_hidden = rows["hidden"].reshape(arguments["hidden"].shape) if needs["hidden"] else None
    return rows, Gradients(d_hidden, sums.weight, sums.bias)


def rounded(arguments: Arguments, name: str, gradient: jax.Array) -> jax.Array:
    """A gradient in the dtype of its array, or in a wider one if it is a partial sum on one device of several."""
    is_partial = name in (arguments["partial_sums"] or ())
    return gradient.astype(arithmetic_dtype(arguments[name]) if is_partial else arguments[name].dtype)


def _zeros(arguments: Arguments, needs: Mapping[str, bool]) -> Gradients:
    dtype = arithmetic_dtype(arguments["hidden"])
    return Gradients(
        None,
        jnp.zeros(arguments["weight"].shape, dtype) if needs["weight"] else None,
        jnp.zeros(vocab(arguments), dtype) if needs["bias"] else None,
    )


def _plus(total: jax.Array | None, part: jax.Array | None) -> jax.Array | None:
    return None if total is None or part is None else total + part
