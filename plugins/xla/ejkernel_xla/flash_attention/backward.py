"""``flash_attention_bwd`` on any device JAX runs on: blocks of queries and keys, in plain JAX."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import jax
from attrs.validators import ge, instance_of, not_

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.flash_attention.far import near_and_far
from ejkernel_ops.symbolic import refuse_symbolic

from . import blockwise_bwd
from .blocks import block_sizes, neighbours

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}
#: The largest blocks of queries and keys that are worth it on a CPU.
CPU_BLOCKS = (1024, 128)


@attrs.frozen
class Config:
    """The sizes of the blocks of queries and of keys."""

    q_block: int = attrs.field(default=512, validator=[instance_of(int), not_(instance_of(bool)), ge(1)])
    kv_block: int = attrs.field(default=128, validator=[instance_of(int), not_(instance_of(bool)), ge(1)])


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """Blocks that keep the device busy."""
    refuse_symbolic(inv)
    return Config(*block_sizes(inv, inv.platform, CPU_BLOCKS))


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """The heuristic's blocks and their neighbours."""
    first = block_sizes(inv, inv.platform, CPU_BLOCKS)
    return [Config(*sizes) for sizes in neighbours(inv, inv.platform, first)]


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise for symbolic sizes; with others, blocks of any size are right."""
    refuse_symbolic(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, ...]:
    """The gradients that ``wrt`` names, in its order."""
    return near_and_far(inv, lambda inv: blockwise_bwd.backward(inv, cfg.q_block, cfg.kv_block))
