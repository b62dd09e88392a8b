"""``grouped_matmul_bwd`` on Hopper, by the products of this backend."""

from __future__ import annotations

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.grouped_matmul.gradients import gradients
from ejkernel_triton.grouped_matmul_sm90 import _tiling

VERSION = 1
PLATFORMS = {"gpu": 45}
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")
PARTS = ("grouped_matmul", "grouped_matmul_d_rhs")


@hookimpl
def heuristic_cfg(inv: Invocation) -> None:
    """There is nothing to choose: each product has configurations of its own."""
    rhs = inv["rhs"]
    _tiling.check(inv, rhs.shape[0], rhs.shape[1:])


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, ...]:
    return gradients(inv, backend="gluon_sm90")
