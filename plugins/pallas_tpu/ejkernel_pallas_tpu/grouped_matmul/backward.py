"""``grouped_matmul_bwd`` on TPUs, by the products of this backend."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.grouped_matmul.gradients import gradients
from ejkernel_pallas_tpu.grouped_matmul import _tuning

VERSION = 1
PLATFORMS = {"tpu": 50}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("tpu",)
COMPILERS = ("jaxlib",)
PARTS = ("grouped_matmul", "grouped_matmul_d_rhs")


@hookimpl
def heuristic_cfg(inv: Invocation) -> None:
    """There is nothing to choose: each product has configurations of its own."""
    _tuning.check(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, ...]:
    """The gradients that ``wrt`` names, in its order."""
    return compute(inv, cfg, False)


def compute(inv: Invocation, cfg: None, interpret: Any) -> tuple[jax.Array, ...]:
    """The same. Whether the products are interpreted is for their kernels to say."""
    return gradients(inv, backend="pallas_tpu")
