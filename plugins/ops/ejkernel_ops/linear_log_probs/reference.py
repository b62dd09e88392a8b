"""``linear_log_probs`` in plain JAX, by its definition."""

from __future__ import annotations

import jax

from ejkernel_core import Invocation, hookimpl

from . import definition

VERSION = 1
PLATFORMS = {"cpu": 0, "gpu": 0, "tpu": 0}


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, ...]:
    return definition.forward(inv)
