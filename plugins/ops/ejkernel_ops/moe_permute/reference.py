"""``moe_permute`` in plain JAX, by its definition."""

from __future__ import annotations

import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.moe_permute import definition

VERSION = 1
PLATFORMS = {"cpu": 0, "gpu": 0, "tpu": 0}


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> jax.Array:
    return definition.permuted(inv["x"], inv["token_order"], inv["k"])
