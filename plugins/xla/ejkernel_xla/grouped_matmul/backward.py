"""``grouped_matmul_bwd`` on any device JAX runs on, by the products of this backend."""

from __future__ import annotations

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.grouped_matmul.gradients import gradients

VERSION = 1
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}
PARTS = ("grouped_matmul", "grouped_matmul_d_rhs")


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, ...]:
    return gradients(inv, backend="xla")
