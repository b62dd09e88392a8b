"""``linear_log_probs`` in Triton, beside XLA's products: the launch of the loss, of which it is the negative."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.fused_linear_cross_entropy.definition import labels_of
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
    """The log-probability of each label, and the entropy of each row if it is needed."""
    rows, shape = _launch.forward(inv, cfg), inv["labels"].shape
    log_probs = jnp.where(labels_of(inv).counts, -rows["losses"], 0)
    entropies = rows.get("entropies")
    return log_probs.reshape(shape), None if entropies is None else entropies.reshape(shape)
