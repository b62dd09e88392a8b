"""``moe_order`` on NVIDIA GPUs, in Triton: the places are counted in blocks, and ordered as ``moe_route`` does."""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs
import jax
import jax.numpy as jnp
from attrs.validators import in_

from ejkernel_core import Invocation, Unsupported, hookimpl
from ejkernel_triton.launch._cards import multiprocessors
from ejkernel_triton.launch._requirements import require_card
from ejkernel_triton.moe_route.order import WARP, launch, ordered, padded

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"gpu": 20}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")

#: The most experts, of which a program has all counts of its block.
MOST_EXPERTS = 1024
BLOCKS = (32, 64, 128)
#: From so many experts on, their counts in small blocks take longer than to compare the places of a large one.
MANY_EXPERTS = 512
#: The least programs of a multiprocessor for which blocks are not the smallest ones.
PROGRAMS = 8


@attrs.frozen
class Config:
    """How many places a program counts."""

    block: int = attrs.field(default=64, validator=in_(BLOCKS))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """Small blocks where they leave few programs, and large ones where there are many experts."""
    check(inv)
    small, medium, large = BLOCKS
    if inv["experts"].size <= small * PROGRAMS * multiprocessors(inv):
        return Config(small)
    return Config(medium if inv["num_experts"] < MANY_EXPERTS else large)


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """All of them."""
    check(inv)
    return map(Config, BLOCKS)


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Any block is right."""
    check(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array]:
    """The sizes of the groups, and the order of the places."""
    experts, count = inv["experts"].reshape(-1), inv["num_experts"]
    slots = experts.size
    if not slots:
        return jnp.zeros(count, jnp.int32), jnp.zeros(0, jnp.int32)
    blocks, columns = math.ceil(slots / cfg.block), count + 1  # places without an expert are those of one more
    of_blocks = jax.ShapeDtypeStruct((blocks, columns), jnp.int32)
    counts, smaller, places = launch(
        inv,
        "ejkernel_triton.moe_order._kernels:count",
        [experts],
        (of_blocks, of_blocks, jax.ShapeDtypeStruct((slots,), jnp.int32)),
        blocks,
        cfg.block // WARP,
        {"EXPERTS": columns, "BINS": padded(columns), "BLOCK": cfg.block},
        (slots,),
    )
    sizes, token_order = ordered(inv, experts, places, counts, smaller, cfg.block)
    return sizes[:count], token_order


def check(inv: Invocation) -> None:
    """Raise where this card, these versions, or this call is not for Triton."""
    require_card(inv)
    if inv["num_experts"] > MOST_EXPERTS:
        raise Unsupported(f"the Triton kernel counts up to {MOST_EXPERTS} experts; not {inv['num_experts']}")
