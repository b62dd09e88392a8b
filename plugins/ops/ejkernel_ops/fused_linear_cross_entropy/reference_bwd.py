"""The gradients of ``fused_linear_cross_entropy``, by JAX from its definition."""

from __future__ import annotations

from functools import partial
from typing import Any

from ejkernel_core import Invocation, hookimpl

from . import definition, operation

VERSION = 1
PLATFORMS = {"cpu": 0, "gpu": 0, "tpu": 0}


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> Any:
    forward = partial(definition.forward, has_lse=definition.has_lse_of(inv["d_lse"]))
    return operation.forward.gradients_by_jax(forward, inv)
