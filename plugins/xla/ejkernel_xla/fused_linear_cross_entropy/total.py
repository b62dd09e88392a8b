"""``fused_linear_cross_entropy_sum`` on any device JAX runs on: each chunk of rows with its part of the gradients."""

from __future__ import annotations

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.fused_linear_cross_entropy import gradients
from ejkernel_ops.fused_linear_cross_entropy.definition import arithmetic_dtype, labels_of, weights_of

from .rows import Config, check_cfg, config_space, heuristic_cfg

__all__ = ["PLATFORMS", "VERSION", "Config", "check_cfg", "config_space", "heuristic_cfg", "run_backend"]

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array | None, ...]:
    """The sum, the lse and the loss of each row, and the gradients that are needed."""
    shape, row_weights = inv["labels"].shape, weights_of(inv, labels_of(inv))
    needs = {name: inv.needs(f"{name}_gradient") for name in ("hidden", "weight", "bias")}
    dtype = arithmetic_dtype(inv["hidden"])
    rows, by_name = gradients.with_gradients(inv, cfg.rows, {"d_loss": row_weights}, needs, dtype)
    loss = (rows["losses"] * row_weights).sum()
    losses, lse = rows["losses"].reshape(shape), rows["lse"].reshape(shape)
    return loss, lse, losses, by_name.hidden, by_name.weight, by_name.bias
