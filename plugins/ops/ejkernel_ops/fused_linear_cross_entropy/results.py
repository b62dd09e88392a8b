"""The results of kernels that take rows in chunks, from what they compute of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation

from .definition import Gradients, arithmetic_dtype, labels_of, weights_of
from .gradients import rounded

MATRICES = ("hidden", "weight", "bias")


class Differentiate(Protocol):
    """What rows give, and the needed gradients, as ``gradients.with_gradients`` has them."""

    def __call__(
        self, cotangents: Mapping[str, Any], needs: Mapping[str, bool], dtype: Any
    ) -> tuple[dict[str, Any], Gradients]: ...


def of_rows(inv: Invocation, losses: jax.Array, lse: jax.Array) -> tuple[jax.Array, ...]:
    """Those of ``fused_linear_cross_entropy``."""
    shape = inv["labels"].shape
    weighted = losses * weights_of(inv, labels_of(inv))
    return weighted.reshape(shape), lse.reshape(shape), losses.reshape(shape)


def of_sum(inv: Invocation, differentiate: Differentiate) -> tuple[jax.Array | None, ...]:
    """Those of ``fused_linear_cross_entropy_sum``: the gradients that are needed, in the dtype of the arithmetic."""
    shape, row_weights = inv["labels"].shape, weights_of(inv, labels_of(inv))
    needs = {name: inv.needs(f"{name}_gradient") for name in MATRICES}
    rows, by_name = differentiate({"d_loss": row_weights}, needs, arithmetic_dtype(inv["hidden"]))
    loss = (rows["losses"] * row_weights).sum()
    losses, lse = rows["losses"].reshape(shape), rows["lse"].reshape(shape)
    return loss, lse, losses, by_name.hidden, by_name.weight, by_name.bias


def of_gradients(inv: Invocation, differentiate: Differentiate) -> tuple[jax.Array | None, ...]:
    """Those of ``fused_linear_cross_entropy_bwd``: the gradients of the arrays that ``wrt`` names."""
    wrt, wide = inv["wrt"], arithmetic_dtype(inv["hidden"])
    d_loss = jnp.zeros(inv["labels"].shape, wide) if inv["d_loss"] is None else inv["d_loss"]
    needs = {name: name in wrt and inv.needs(name) for name in MATRICES}
    by_name: dict[str, Any] = {"token_weights": d_loss * inv["row_losses"]}
    if any(needs.values()):
        cotangents = {"d_loss": d_loss.reshape(-1) * weights_of(inv, labels_of(inv))}
        if inv["d_lse"] is not None:
            cotangents["d_lse"] = inv["d_lse"].reshape(-1)
        by_name |= differentiate(cotangents, needs, inv["hidden"].dtype)[1]._asdict()
    return tuple(rounded(inv, name, by_name[name]) if inv.needs(name) else None for name in wrt)
