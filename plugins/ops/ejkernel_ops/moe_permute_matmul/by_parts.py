"""``moe_permute_matmul`` by the best kernel for each of its parts."""

from __future__ import annotations

import jax

from ejkernel_core import Invocation, hookimpl

from . import parts

VERSION = 1
PLATFORMS = {"cpu": 50, "gpu": 50, "tpu": 50}
PARTS = ("moe_permute", "grouped_matmul")


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> jax.Array:
    return parts.forward(inv)
