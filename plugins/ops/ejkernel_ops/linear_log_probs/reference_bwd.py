"""The gradients of ``linear_log_probs``, by JAX from its definition."""

from __future__ import annotations

from typing import Any

from ejkernel_core import Invocation, hookimpl

from . import definition, operation

VERSION = 1
PLATFORMS = {"cpu": 0, "gpu": 0, "tpu": 0}


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> Any:
    return operation.forward.gradients_by_jax(definition.forward, inv)
