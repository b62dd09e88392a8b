"""The gradients of a weighted sum of losses and lse, chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_ops.fused_linear_cross_entropy import definition
from ejkernel_ops.fused_linear_cross_entropy.definition import Gradients, arithmetic_dtype, vocab

from . import chunks

Arguments = Mapping[str, Any]


def with_gradients(
    arguments: Arguments, most_rows: int, cotangents: Mapping[str, Any], needs: Mapping[str, bool], dtype: Any
) -> tuple[dict[str, Any], Gradients]:
    """The loss and the lse of each row, and the needed gradients. ``cotangents`` has those of each row: "d_loss", and
    "d_lse" if there is one. The gradient of the hidden states has this dtype, sums over rows that of the arithmetic.
    """

    def step(sums: Gradients, arrays: dict[str, Any]) -> tuple[Gradients, dict[str, Any]]:
        hidden, labels, d_lse = arrays["hidden"], chunks.labels_of(arrays), arrays.get("d_lse")
        logits = definition.logits_of(hidden, arguments)
        statistics = definition.statistics_of(logits)
        gradient = definition.d_logits(logits, statistics, labels, arrays["d_loss"], d_lse, arguments)
        parts = definition.products(gradient, hidden, arguments, definition.active_rows(labels, d_lse), needs)
        losses = definition.row_losses(logits, statistics, labels, arguments)
        rows = {"losses": losses, "lse": statistics.lse}
        if parts.hidden is not None:
            rows["hidden"] = parts.hidden.astype(dtype)
        return Gradients(None, _plus(sums.weight, parts.weight), _plus(sums.bias, parts.bias)), rows

    arrays = chunks.rows_of(arguments) | dict(cotangents)
    sums, rows = chunks.over_chunks(step, _zeros(arguments, needs), arrays, most_rows)
    d_hidden = rows["hidden"].reshape(arguments["hidden"].shape) if needs["hidden"] else None
    return rows, Gradients(d_hidden, sums.weight, sums.bias)


def _zeros(arguments: Arguments, needs: Mapping[str, bool]) -> Gradients:
    dtype = arithmetic_dtype(arguments["hidden"])
    return Gradients(
        None,
        jnp.zeros(arguments["weight"].shape, dtype) if needs["weight"] else None,
        jnp.zeros(vocab(arguments), dtype) if needs["bias"] else None,
    )


def _plus(total: jax.Array | None, part: jax.Array | None) -> jax.Array | None:
    return None if total is None or part is None else total + part
