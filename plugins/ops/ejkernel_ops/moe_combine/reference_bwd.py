"""The gradients of ``moe_combine``, by JAX from its definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.moe_permute import definition

from . import operation

VERSION = 1
PLATFORMS = {"cpu": 0, "gpu": 0, "tpu": 0}


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> Any:
    return operation.forward.gradients_by_jax(forward, inv)


def forward(arguments: Mapping[str, Any]) -> jax.Array:
    """The result."""
    return definition.combined(arguments["y"], arguments["token_order"], arguments["weights"])
