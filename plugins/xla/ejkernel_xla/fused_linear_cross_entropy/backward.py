"""``fused_linear_cross_entropy_bwd`` on any device JAX runs on: the logits of each chunk of rows again."""

from __future__ import annotations

from functools import partial

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.fused_linear_cross_entropy import gradients, results

from .rows import Config, check_cfg, config_space, heuristic_cfg

__all__ = ["PLATFORMS", "VERSION", "Config", "check_cfg", "config_space", "heuristic_cfg", "run_backend"]

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array | None, ...]:
    """The gradients of the arrays that ``wrt`` names."""
    return results.of_gradients(inv, partial(gradients.with_gradients, inv, cfg.rows))
