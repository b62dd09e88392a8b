"""``flash_attention`` on TPUs, in Pallas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from attrs.validators import in_, instance_of

from ejkernel_core import Invocation, hookimpl
from ejkernel_pallas_tpu.flash_attention import _tuning
from ejkernel_pallas_tpu.flash_attention._refusals import check, check_arguments

#: Of the kernel and of its Config: what was measured with another one is measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"tpu": 50}
COMPILERS = ("jaxlib",)


@attrs.frozen
class Config:
    """How many queries stay, and how many keys go by at a time."""

    q_block: int = attrs.field(default=512, validator=in_(_tuning.BLOCKS))
    k_block: int = attrs.field(default=512, validator=in_(_tuning.BLOCKS))
    #: Run in Pallas' interpreter, wherever it is: for debugging.
    interpret: bool = attrs.field(default=False, validator=instance_of(bool))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """The blocks for this generation of TPUs."""
    check(inv)
    return Config(*_tuning.fitting(inv, "forward")[0])


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """The blocks that fit into vector memory."""
    check(inv)
    return [Config(*blocks) for blocks in _tuning.fitting(inv, "forward")]


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise where these kernels do not do the call: in the interpreter they run anywhere."""
    (check_arguments if cfg.interpret else check)(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp of every row."""
    return compute(inv, cfg, cfg.interpret)


def compute(inv: Invocation, cfg: Config, interpret: Any) -> tuple[jax.Array, jax.Array]:
    """The same, ``interpret`` being Pallas' own word."""
    from ejkernel_pallas_tpu.flash_attention._forward import attend
    from ejkernel_pallas_tpu.flash_attention._operands import seed
    from ejkernel_pallas_tpu.flash_attention._problem import problem
    from ejkernel_pallas_tpu.flash_attention._sight import meetings

    (batch, q_length, heads, _), v_dim = inv["query"].shape, inv["value"].shape[3]
    if 0 in (batch, q_length):
        return (
            jnp.zeros((batch, q_length, heads, v_dim), inv["value"].dtype),
            jnp.zeros((batch, heads, q_length), jnp.float32),
        )
    p = problem(inv, cfg.q_block, cfg.k_block)
    sight = meetings(inv, p).from_queries()
    return attend(inv, p, sight, seed(inv), interpret, _tuning.vmem(inv))
