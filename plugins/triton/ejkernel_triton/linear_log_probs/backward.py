"""``linear_log_probs_bwd`` in Triton, beside XLA's products: the logits again."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.fused_linear_cross_entropy import gradients
from ejkernel_triton.fused_linear_cross_entropy import _launch
from ejkernel_triton.fused_linear_cross_entropy._tiling import Config, check_cfg, config_space, heuristic_cfg

__all__ = ["COMPILERS", "OPAQUE", "PLATFORMS", "VERSION", "Config", "check_cfg", "config_space", "heuristic_cfg"]

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there: after the kernel in plain JAX, until both have been measured.
PLATFORMS = {"gpu": 5}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array | None, ...]:
    """The gradients of the arrays that ``wrt`` names."""
    needs = {name: name in inv["wrt"] and inv.needs(name) for name in ("hidden", "weight", "bias")}
    by_name = _launch.with_gradients(inv, cfg, _cotangents(inv), needs, inv["hidden"].dtype)[1]._asdict()
    return tuple(gradients.rounded(inv, name, by_name[name]) if needs[name] else None for name in inv["wrt"])


def _cotangents(inv: Invocation) -> dict[str, jax.Array]:
    """Those of the loss, which is the negative of a log-probability, and of the entropy if it has one."""
    d_log_probs, d_entropy = inv["d_log_probs"], inv["d_entropy"]
    d_loss = jnp.zeros(inv["labels"].shape, jnp.float32) if d_log_probs is None else -d_log_probs
    of_entropy = {} if d_entropy is None else {"d_entropy": d_entropy.reshape(-1)}
    return {"d_loss": d_loss.reshape(-1), **of_entropy}
