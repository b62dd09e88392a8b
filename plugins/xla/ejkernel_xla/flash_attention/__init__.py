"""``flash_attention`` on any device JAX runs on: blocks of queries and keys, in plain JAX."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import jax
from attrs.validators import ge, instance_of

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.flash_attention.symbolic import refuse_symbolic

from . import blockwise
from .blocks import blocks, nearby

#: Of the kernel and of its Config: what was measured with another one is measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}
#: The largest blocks of queries and keys that pay on a CPU.
CPU_BLOCKS = (512, 256)


@attrs.frozen
class Config:
    """How many queries and keys a tile has."""

    q_block: int = attrs.field(default=256, validator=[instance_of(int), ge(1)])
    kv_block: int = attrs.field(default=256, validator=[instance_of(int), ge(1)])


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """Blocks that keep the device busy."""
    refuse_symbolic(inv)
    return Config(*blocks(inv, inv.platform, CPU_BLOCKS))


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """The heuristic's blocks and their neighbours."""
    return [Config(*pair) for pair in nearby(inv, inv.platform, blocks(inv, inv.platform, CPU_BLOCKS))]


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise where the sizes are symbolic: any blocks compute the rest."""
    refuse_symbolic(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp of every row."""
    return blockwise.forward(inv, cfg.q_block, cfg.kv_block)
