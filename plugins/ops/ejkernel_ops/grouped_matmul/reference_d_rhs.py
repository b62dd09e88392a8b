"""``grouped_matmul_d_rhs`` in plain JAX, by its definition."""

from __future__ import annotations

import jax

from ejkernel_core import Invocation, hookimpl

from . import definition

VERSION = 1
PLATFORMS = {"cpu": 0, "gpu": 0, "tpu": 0}


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> jax.Array:
    return definition.d_rhs(inv)
