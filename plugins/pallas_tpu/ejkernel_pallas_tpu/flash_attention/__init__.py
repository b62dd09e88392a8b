"""``flash_attention`` on TPUs, in Pallas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from attrs.validators import in_, instance_of

from ejkernel_core import Example, Invocation, hookimpl
from ejkernel_pallas_tpu.flash_attention import _tuning
from ejkernel_pallas_tpu.flash_attention._refusals import check, check_arguments

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"tpu": 50}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("tpu",)
COMPILERS = ("jaxlib",)


@attrs.frozen
class Config:
    """The sizes of the blocks of queries, which stay, and of keys, which are fetched one after another."""

    q_block: int = attrs.field(default=512, validator=in_(_tuning.BLOCKS))
    k_block: int = attrs.field(default=512, validator=in_(_tuning.BLOCKS))
    #: Run in the interpreter of Pallas, on any device, for debugging.
    interpret: bool = attrs.field(default=False, validator=instance_of(bool))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """The blocks that are best on this generation of TPUs."""
    check(inv)
    return Config(*_tuning.block_shapes(inv, "forward")[0])


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """The blocks that fit into vector memory."""
    check(inv)
    return [Config(*blocks) for blocks in _tuning.block_shapes(inv, "forward")]


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise for what the kernels do not support; the interpreter runs on any device."""
    (check_arguments if cfg.interpret else check)(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array | None]:
    """The output and, if it is needed, the lse of every row."""
    return compute(inv, cfg, cfg.interpret)


def compute(inv: Invocation, cfg: Config, interpret: Any) -> tuple[jax.Array, jax.Array | None]:
    """The same; ``interpret`` is that of ``pl.pallas_call``."""
    from ejkernel_pallas_tpu.flash_attention._forward import attend
    from ejkernel_pallas_tpu.flash_attention._problem import problem
    from ejkernel_pallas_tpu.flash_attention._scalars import scalars
    from ejkernel_pallas_tpu.flash_attention._steps import pairs

    (batch, q_length, heads, _), v_dim = inv["query"].shape, inv["value"].shape[3]
    if 0 in (batch, q_length):
        return (
            jnp.zeros((batch, q_length, heads, v_dim), inv["value"].dtype),
            jnp.zeros((batch, heads, q_length), jnp.float32),
        )
    p = problem(inv, cfg.q_block, cfg.k_block)
    return attend(inv, p, pairs(inv, p).query_steps(), scalars(inv), interpret, _tuning.vmem_limit(inv))


def vmem(inv: Invocation, cfg: Config) -> int:
    """At most how many bytes of vector memory the kernel takes."""
    return _tuning.vmem_bytes(inv, "forward", (cfg.q_block, cfg.k_block))


def peers(example: Example) -> Iterable[Any]:
    """JAX's own attention for TPUs."""
    from ejkernel_pallas_tpu.flash_attention._peers import peers

    return peers(example)
