"""Attention as its definition says it, densely: what every other kernel is measured against, and the last resort."""

from __future__ import annotations

import attrs
import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.flash_attention.dense import dense_attention

#: Of the kernel and of its Config: what was measured with another one is measured again.
VERSION = 1
#: After everything else, on every platform.
PLATFORMS = {"cpu": 0, "gpu": 0, "tpu": 0}


@attrs.frozen
class Config:
    """Nothing to choose."""


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    return Config()


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array]:
    return dense_attention(inv)
