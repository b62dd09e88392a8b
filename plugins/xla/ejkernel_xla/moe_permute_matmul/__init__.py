"""``moe_permute_matmul`` on any device JAX runs on, by the parts of this backend."""

from __future__ import annotations

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.moe_permute_matmul import parts
from ejkernel_ops.symbolic import refuse_symbolic

VERSION = 1
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}
PARTS = ("moe_permute", "grouped_matmul")


@hookimpl
def heuristic_cfg(inv: Invocation) -> None:
    """There is nothing to choose: the product has configurations of its own."""
    refuse_symbolic(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> jax.Array:
    return parts.forward(inv, backend="xla")
