"""Dense attention, by its definition. Every kernel is compared with this one, and it is chosen last."""

from __future__ import annotations

import attrs
import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.flash_attention.dense import dense_attention

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: The lowest rank, on every platform.
PLATFORMS = {"cpu": 0, "gpu": 0, "tpu": 0}


@attrs.frozen
class Config:
    """Empty, because there is only one way to run this kernel."""


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    return Config()


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array]:
    return dense_attention(inv)
