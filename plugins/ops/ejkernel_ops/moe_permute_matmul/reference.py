"""``moe_permute_matmul`` in plain JAX, by the definitions of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.grouped_matmul import definition as grouped_matmul
from ejkernel_ops.moe_permute import definition as moe_permute

from .parts import product_arguments

VERSION = 1
PLATFORMS = {"cpu": 0, "gpu": 0, "tpu": 0}


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> jax.Array:
    return forward(inv)


def forward(arguments: Mapping[str, Any]) -> jax.Array:
    """The result, rounded once."""
    rows = moe_permute.permuted(arguments["x"], arguments["token_order"], arguments["k"])
    return grouped_matmul.forward(product_arguments(arguments, rows))
