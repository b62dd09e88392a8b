"""``moe_permute_matmul_bwd`` on any device JAX runs on, by the parts of this backend."""

from __future__ import annotations

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.moe_permute_matmul import parts

VERSION = 1
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}
PARTS = ("moe_permute", "grouped_matmul_bwd", "moe_combine")


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, ...]:
    return parts.gradients(inv, backend="xla")
