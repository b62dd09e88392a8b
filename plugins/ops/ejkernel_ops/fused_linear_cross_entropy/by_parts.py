"""``fused_linear_cross_entropy_sum_bwd``: the gradients that the forward made, times the cotangent of the sum. Where
the lse has a cotangent too, they are those of the loss of each row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, plain_kernel

from .axes import GRADIENTS, is_of_sum_alone
from .definition import arithmetic_dtype, multiples
from .reference import gradients_of_sum_by_jax


def _gradients(inv: Invocation) -> tuple[jax.Array, ...]:
    if any(inv[f"d_{name}"] is not None for name in GRADIENTS):  # second derivatives
        by_jax: tuple[jax.Array, ...] = gradients_of_sum_by_jax(inv)
        return by_jax
    return multiples(inv) if is_of_sum_alone(inv) else _gradients_of_rows(inv)


def _gradients_of_rows(inv: Invocation) -> tuple[jax.Array, ...]:
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


total_backward = plain_kernel(_gradients, rank=50, parts=("fused_linear_cross_entropy_bwd",), version=1)
