"""``moe_route`` on NVIDIA GPUs, in Triton."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from attrs.validators import in_

from ejkernel_core import Invocation, Unsupported, hookimpl
from ejkernel_ops.moe_route.operation import outputs
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability
from ejkernel_triton.launch._requirements import require_card

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"gpu": 20}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")

DTYPES = ("float16", "bfloat16", "float32")
#: The most experts whose scores a program holds, and the most of them that a token may have.
MOST_EXPERTS, MOST_CHOSEN = 1024, 32
#: The scores that a thread holds: more do not fit into registers.
SCORES = 32
#: The threads of a warp.
WARP = 32
#: Experts of a program of the second kernel, and blocks of tokens that it reads at a time.
COLUMNS, ROWS = 16, 64


@attrs.frozen
class Config:
    """How many tokens a program has, and by how many warps it is run."""

    tokens: int = attrs.field(default=32, validator=in_((1, 2, 4, 8, 16, 32, 64, 128)))
    num_warps: int = attrs.field(default=4, validator=in_((1, 2, 4, 8)))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """As many tokens as fit into the registers of four warps."""
    check(inv)
    return Config(tokens=max(1, min(64, SCORES * 4 * WARP // columns(inv))))


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """The heuristic's, half and twice as many tokens, with more and fewer warps, where that fits into registers."""
    first = heuristic_cfg(inv)
    sizes = [size for size in (first.tokens, first.tokens // 2, 2 * first.tokens) if 1 <= size <= 128]
    others = (Config(size, warps) for size in sizes for warps in (4, 2, 8))
    return [first, *(cfg for cfg in others if cfg != first and _fits(inv, cfg))]


def _fits(inv: Invocation, cfg: Config) -> bool:
    return cfg.tokens * columns(inv) <= SCORES * cfg.num_warps * WARP


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Any number of tokens is right."""
    check(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, ...]:
    """The weights, the experts, their sizes and the order of the tokens."""
    logits, bias, k = inv["router_logits"], inv["expert_bias"], inv["k"]
    tokens, experts = logits.shape
    weights, chosen, sizes, order = outputs(inv)
    if not tokens:
        return tuple(jnp.zeros(output.shape, output.dtype) for output in (weights, chosen, sizes, order))
    blocks = math.ceil(tokens / cfg.tokens)
    counts = jax.ShapeDtypeStruct((blocks, experts), jnp.int32)
    groups = inv["num_groups"] or 1
    shape = {"EXPERTS": experts, "K": k, "TOKENS": cfg.tokens}
    constants = {
        **shape,
        "SLOTS": padded(k),
        "SCORE": inv["score"],
        "BIAS": bias is not None,
        "GROUPS": groups,
        "GROUP_K": inv["group_topk"] or 1,
        "WIDTH": padded(experts // groups),
        "HEIGHT": padded(groups),
        "RENORMALIZE": inv["renormalize"],
        "FACTOR": float(inv["scaling_factor"]),
    }
    arrays = [logits, logits if bias is None else bias]
    of_tokens, of_experts, counts_of_blocks = _launch(
        "choose", inv, cfg, arrays, (weights, chosen, counts), blocks, constants, (tokens,)
    )
    starts, sizes_of_experts = _launch(
        "place_blocks",
        inv,
        cfg,
        [counts_of_blocks],
        (counts, sizes),
        math.ceil(experts / COLUMNS),
        {"EXPERTS": experts, "COLUMNS": COLUMNS, "ROWS": ROWS},
        (blocks,),
    )
    (token_order,) = _launch(
        "order",
        inv,
        cfg,
        [of_experts, starts, sizes_of_experts],
        (order,),
        blocks,
        {**shape, "WIDTH": padded(experts)},
        (tokens,),
    )
    return of_tokens, of_experts, sizes_of_experts, token_order


def check(inv: Invocation) -> None:
    """Raise where this card, these versions, or this call is not for Triton."""
    require_card(inv)
    experts = inv["router_logits"].shape[1]
    for name in ("router_logits", "expert_bias"):
        dtype = None if inv[name] is None else str(inv[name].dtype)
        if dtype not in (None, *DTYPES):
            raise Unsupported(f"the Triton kernels take {', '.join(DTYPES)}; {name} is {dtype}")
    if experts > MOST_EXPERTS or inv["k"] > MOST_CHOSEN:
        raise Unsupported(
            f"the Triton kernel chooses up to {MOST_CHOSEN} of {MOST_EXPERTS} experts; not {inv['k']} of {experts}"
        )


def padded(size: int) -> int:
    """The next power of two."""
    return 1 << max(size - 1, 0).bit_length()


def columns(inv: Invocation) -> int:
    """The columns in which a program has the experts, by groups."""
    groups = inv["num_groups"] or 1
    return padded(groups) * padded(inv["router_logits"].shape[1] // groups)


def _launch(
    kernel: str,
    inv: Invocation,
    cfg: Config,
    arrays: list[Any],
    results: tuple[jax.ShapeDtypeStruct, ...],
    programs: int,
    constants: dict[str, Any],
    scalars: tuple[int, ...],
) -> tuple[jax.Array, ...]:
    return _jax_triton.call(
        f"ejkernel_triton.moe_route._kernels:{kernel}",
        arrays,
        results,
        scalars=scalars,
        grid=(programs,),
        constants=constants,
        num_warps=cfg.num_warps,
        num_stages=1,
        compute_capability=capability(inv),
        name=f"moe_route_{kernel}",
    )
