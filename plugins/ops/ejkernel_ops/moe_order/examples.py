"""The examples that every kernel of ``moe_order`` is tested on, and the calls that are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Example

Arguments = dict[str, Any]

#: (tokens, k, experts): none is a multiple of a block.
SHAPES = ((33, 2, 8), (1, 8, 60), (90, 8, 128), (7, 1, 1), (0, 2, 16), (5, 3, 300), (300, 2, 4))
TRANSFORMS = frozenset({"values", "jit", "vmap", "vmap_of_other_axes", "checkpoint"})


def examples() -> Iterator[Example]:
    """The examples of ``moe_order``."""
    for tokens, k, experts in SHAPES:
        yield _example(f"{tokens}x{k}-{experts}", partial(drawn, tokens, k, experts))
    faults: dict[str, Callable[[int], Arguments]] = {
        "one-expert-for-all": lambda draw: _with(draw, lambda experts: np.full_like(experts, 3)),
        "no-expert-for-any": lambda draw: _with(draw, lambda experts: np.full_like(experts, -1)),
        "one-twice-for-a-token": lambda draw: _with(draw, lambda experts: experts[:, :1].repeat(2, 1)),
        "sorted": lambda draw: _with(draw, lambda experts: np.sort(experts, None).reshape(experts.shape)),
        "no-expert-for-some": _without_some,
        "far-from-an-expert": _far,
        "of-8-bits": lambda draw: _with(draw, lambda experts: experts.astype(np.int8)),
    }
    for name, arguments in faults.items():
        yield _example(name, arguments)
    yield _example("transformed", _without_some, checks=TRANSFORMS)
    for name, tokens in (("blocks", 64), ("blocks-and-a-tail", 75)):
        yield _example(name, partial(drawn, tokens, 4, 12), checks=frozenset({"configurations"}))
    for tokens, k, count in ((65536, 8, 128), (16384, 8, 128), (16384, 8, 256), (16384, 4, 32), (16384, 2, 8)):
        yield _large(tokens, k, count)
    for tokens in (2048, 64):
        yield _large(tokens, 8, 128)


def drawn(tokens: int, k: int, count: int, draw: int) -> Arguments:
    """Experts that are equally probable, of which a token may have one twice."""
    experts = np.random.default_rng([draw, tokens, k, count]).integers(0, count, (tokens, k), np.int32)
    return {"experts": experts, "num_experts": count}


def _with(draw: int, change: Callable[[np.ndarray], np.ndarray]) -> Arguments:
    arguments = drawn(50, 2, 9, draw)
    return {**arguments, "experts": change(arguments["experts"])}


def _without_some(draw: int) -> Arguments:
    """Places before the first expert and after the last one have none."""
    arguments = drawn(70, 2, 12, draw)
    return {"experts": arguments["experts"] - 2, "num_experts": 8}


def _far(draw: int) -> Arguments:
    def change(experts: np.ndarray) -> np.ndarray:
        experts[3:20], experts[30:33] = np.iinfo(np.int32).max, np.iinfo(np.int32).min
        return experts

    return _with(draw, change)


def _large(tokens: int, k: int, count: int) -> Example:
    """A call that is measured."""

    def arguments(draw: int) -> Arguments:
        experts = jax.random.randint(jax.random.key(draw), (tokens, k), 0, count, jnp.int32)
        return {"experts": experts, "num_experts": count}

    uses = frozenset({"benchmark", *(("resources",) if (tokens, count) == (16384, 128) else ())})
    return Example(f"{tokens} tokens, {k} of {count}", "moe_order", arguments, checks=frozenset(), uses=uses)


def _example(name: str, arguments: Callable[[int], Arguments], **fields: Any) -> Example:
    return Example(name, "moe_order", arguments, **fields)
