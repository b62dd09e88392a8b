"""``fused_linear_cross_entropy_sum_bwd``: the gradients that the forward made, times the cotangent of the sum. Where
the lse has a cotangent too, they are those of the loss of each row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, Unsupported, hookimpl

from .axes import GRADIENTS, is_of_sum_alone
from .definition import arithmetic_dtype

VERSION = 1
PLATFORMS = {"cpu": 50, "gpu": 50, "tpu": 50}
PARTS = ("fused_linear_cross_entropy_bwd",)


@hookimpl
def heuristic_cfg(inv: Invocation) -> None:
    """Refuse the derivatives of the gradients that the forward made."""
    if any(inv[f"d_{name}"] is not None for name in GRADIENTS):
        raise Unsupported("second derivatives are computed by the reference")


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, ...]:
    return multiples(inv) if is_of_sum_alone(inv) else of_rows(inv)


def multiples(inv: Invocation) -> tuple[jax.Array, ...]:
    """The gradients of the forward, times the cotangent of the sum: rounded once, here."""
    by_array = {array: inv[result] for result, array in GRADIENTS.items()}
    return tuple((inv["d_loss"] * by_array[name]).astype(_dtype(inv, name)) for name in inv["wrt"])


def of_rows(inv: Invocation) -> tuple[jax.Array, ...]:
    """The gradients from the cotangents of the loss and the lse of each row."""
    names = ("hidden", "weight", "labels", "bias", "token_weights", "vocab_start", "row_losses", "lse", "wrt", "d_lse")
    options = ("transpose_weight", "ignore_index", "logits_soft_cap", "z_loss", "label_smoothing", "return_lse")
    d_loss = jnp.zeros((), arithmetic_dtype(inv["hidden"])) if inv["d_loss"] is None else inv["d_loss"]
    call = {name: inv[name] for name in (*names, *options)}
    call |= {"loss": inv["row_losses"], "d_loss": jnp.full_like(inv["row_losses"], d_loss)}
    gradients: tuple[jax.Array, ...] = inv.call(
        "fused_linear_cross_entropy_bwd", **call, partial_sums=inv["partial_sums"]
    )
    return gradients


def _dtype(inv: Invocation, name: str) -> object:
    """The dtype of a gradient: that of its array, or a wider one if it is a partial sum on one device of several."""
    return arithmetic_dtype(inv[name]) if name in (inv["partial_sums"] or ()) else inv[name].dtype
