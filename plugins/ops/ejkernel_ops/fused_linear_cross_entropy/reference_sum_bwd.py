"""The gradients of ``fused_linear_cross_entropy_sum``: those of the forward, times a number, or by JAX from its
definition.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ejkernel_core import Invocation, hookimpl

from . import definition, operation
from .axes import is_of_sum_alone

VERSION = 1
PLATFORMS = {"cpu": 0, "gpu": 0, "tpu": 0}


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> Any:
    if is_of_sum_alone(inv):
        return definition.multiples(inv)
    forward = partial(definition.sum_forward, has_lse=definition.has_lse_of(inv["d_lse"]))
    return operation.total.gradients_by_jax(forward, inv)
