"""``moe_route`` on NVIDIA GPUs, in Triton."""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs
import jax
import jax.numpy as jnp
from attrs.validators import in_

from ejkernel_core import Invocation, Unsupported, hookimpl
from ejkernel_ops.moe_route.operation import outputs
from ejkernel_triton.launch._cards import multiprocessors
from ejkernel_triton.launch._requirements import require_card
from ejkernel_triton.moe_route.order import WARP, launch, ordered, padded

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 2
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"gpu": 20}
#: XLA sees a custom call, which it cannot partition.
OPAQUE = ("gpu",)
COMPILERS = ("triton", "jax-triton")

DTYPES = ("float16", "bfloat16", "float32")
#: The most experts whose scores a program holds, and the most of them that a token may have.
MOST_EXPERTS, MOST_CHOSEN = 1024, 32
#: The most scores that a thread holds without spilling registers, and how many it holds best.
MOST_SCORES, SCORES = 32, 16
#: The most tokens of a program, the least of them at a time, and the programs that fill a multiprocessor.
MOST_TOKENS, ROWS, PROGRAMS = 32, 4, 7


@attrs.frozen
class Config:
    """How many tokens a program of one warp has, and how many of them at a time."""

    tokens: int = attrs.field(default=32, validator=in_((1, 2, 4, 8, 16, 32, 64)))
    rows: int = attrs.field(default=4, validator=in_((1, 2, 4, 8, 16, 32, 64)))


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """As many tokens as leave enough programs to fill the card; at a time as many as give a thread few scores."""
    check(inv)
    most = inv["router_logits"].shape[0] // (PROGRAMS * multiprocessors(inv))
    tokens = max(1, min(MOST_TOKENS, padded(most + 1) // 2))
    rows = max(ROWS, SCORES * WARP // columns(inv))
    return Config(tokens, min(rows, tokens, most_rows(inv)))


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """The heuristic's, and half and twice as many tokens of a program, at a time, or both."""
    first = heuristic_cfg(inv)
    tokens, rows = first.tokens, first.rows
    half = (tokens // 2, min(tokens // 2, rows))
    pairs = [(2 * tokens, rows), half, (tokens, rows // 2), (tokens, 2 * rows), (2 * tokens, 2 * rows)]
    return [first, *(Config(*pair) for pair in pairs if 1 <= pair[1] <= min(pair[0], most_rows(inv)))]


def most_rows(inv: Invocation) -> int:
    """The most tokens whose scores fit into the registers of a warp."""
    return max(1, MOST_SCORES * WARP // columns(inv))


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
    of_blocks = jax.ShapeDtypeStruct((blocks, experts), jnp.int32)
    groups = inv["num_groups"] or 1
    constants = {
        "EXPERTS": experts,
        "K": k,
        "TOKENS": cfg.tokens,
        "ROWS": min(cfg.rows, cfg.tokens),
        "SCORE": inv["score"],
        "BIAS": bias is not None,
        "GROUPS": groups,
        "GROUP_K": inv["group_topk"] or 1,
        "WIDTH": padded(experts // groups),
        "HEIGHT": padded(groups),
        "RENORMALIZE": inv["renormalize"],
        "FACTOR": float(inv["scaling_factor"]),
    }
    of_tokens, of_experts, counts, smaller, places = launch(
        inv,
        "ejkernel_triton.moe_route._kernels:choose",
        [logits, logits if bias is None else bias],
        (weights, chosen, of_blocks, of_blocks, order),
        blocks,
        1,
        constants,
        (tokens,),
    )
    return of_tokens, of_experts, *ordered(inv, of_experts, places, counts, smaller, cfg.tokens * k)


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


def columns(inv: Invocation) -> int:
    """The columns in which a program has the experts, by groups."""
    groups = inv["num_groups"] or 1
    return padded(groups) * padded(inv["router_logits"].shape[1] // groups)
