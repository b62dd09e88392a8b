"""``grouped_matmul_bwd`` by the best kernel for each of its products."""

from __future__ import annotations

import jax

from ejkernel_core import Invocation, hookimpl

from .gradients import gradients

VERSION = 1
PLATFORMS = {"cpu": 50, "gpu": 50, "tpu": 50}
PARTS = ("grouped_matmul", "grouped_matmul_d_rhs")


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, ...]:
    return gradients(inv)
