"""``flash_attention`` on any device JAX runs on; through cuDNN on a GPU where that is exact."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import jax
from attrs.validators import ge, in_, instance_of

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.attention.symbolic import refuse_symbolic
from ejkernel_xla import _blockwise, _cudnn
from ejkernel_xla._blocks import blocks

#: Of the kernel and of its Config: what was measured with another one is measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}


@attrs.frozen
class Config:
    """How a forward pass is computed. cuDNN chooses its own blocks."""

    implementation: str = attrs.field(default="blockwise", validator=in_(("blockwise", "cudnn")))
    q_block: int = attrs.field(default=256, validator=[instance_of(int), ge(1)])
    kv_block: int = attrs.field(default=256, validator=[instance_of(int), ge(1)])


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """CuDNN where it does exactly what is asked, else blocks that keep the device busy."""
    refuse_symbolic(inv)
    if inv.platform == "gpu" and _cudnn.refusal(inv) is None:
        return Config("cudnn")
    return Config("blockwise", *blocks(inv, inv.platform, cpu=(512, 256)))


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """CuDNN where it is exact, and the heuristic's blocks; with their neighbours where these may win."""
    return [Config(*how) for how in _cudnn.beside_blocks(inv, blocks(inv, inv.platform, cpu=(512, 256)))]


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise where cuDNN is asked for and does not do exactly this."""
    refuse_symbolic(inv)
    if cfg.implementation == "cudnn":
        _cudnn.check(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp of every row."""
    if cfg.implementation == "blockwise":
        return _blockwise.forward(inv, cfg.q_block, cfg.kv_block)
    return _cudnn.forward(inv)
