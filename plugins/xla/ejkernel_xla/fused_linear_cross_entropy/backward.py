"""``fused_linear_cross_entropy_bwd`` on any device JAX runs on: the logits of each chunk of rows again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

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
    """The gradients of the arrays that ``wrt`` names."""
    wrt, wide = inv["wrt"], arithmetic_dtype(inv["hidden"])
    d_loss = jnp.zeros(inv["labels"].shape, wide) if inv["d_loss"] is None else inv["d_loss"]
    needs = {name: name in wrt and inv.needs(name) for name in ("hidden", "weight", "bias")}
    by_name: dict[str, Any] = {"token_weights": d_loss * inv["row_losses"]}
    if any(needs.values()):
        cotangents = {"d_loss": d_loss.reshape(-1) * weights_of(inv, labels_of(inv))}
        if inv["d_lse"] is not None:
            cotangents["d_lse"] = inv["d_lse"].reshape(-1)
        _, of_product = gradients.with_gradients(inv, cfg.rows, cotangents, needs, inv["hidden"].dtype)
        by_name |= of_product._asdict()
    return tuple(gradients.rounded(inv, name, by_name[name]) if inv.needs(name) else None for name in wrt)
