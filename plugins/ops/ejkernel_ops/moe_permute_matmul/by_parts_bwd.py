"""``moe_permute_matmul_bwd`` by the best kernel for each of its parts."""

from __future__ import annotations

import jax

from ejkernel_core import Invocation, hookimpl

from . import parts

VERSION = 1
PLATFORMS = {"cpu": 50, "gpu": 50, "tpu": 50}
PARTS = ("moe_permute", "grouped_matmul_bwd", "moe_combine")


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, ...]:
    return parts.gradients(inv)
