"""The examples that kernels of ``moe_permute`` and ``moe_combine`` are tested on, and the calls that are measured."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Example

Arguments = dict[str, Any]

#: (tokens, k, dim): none is a multiple of a block.
SHAPES = ((33, 2, 70), (1, 8, 130), (200, 4, 24), (7, 1, 257), (0, 2, 16), (5, 3, 1))
TRANSFORMS = frozenset({"jit", "vmap", "vmap_of_grad", "grad_of_vmap", "checkpoint", "scan", "sharding"})
SHARDED_TWICE = frozenset({"sharded_derivatives"})
#: (tokens, k, dim) of well-known models.
LAYERS = ((16384, 8, 2048), (16384, 8, 4096), (16384, 4, 2880), (16384, 2, 4096), (64, 8, 2048))


def permute_examples() -> Iterator[Example]:
    """The examples of ``moe_permute``."""
    for tokens, k, dim in SHAPES:
        for dtype in ("float32", "bfloat16", "float16", "float64"):
            arguments = partial(permute_arguments, tokens, k, dim)
            yield _example(f"{tokens}x{k}x{dim}-{dtype}", "moe_permute", arguments, dtype=dtype, wrt=("x",))
    arguments = partial(permute_arguments, 12, 2, 8)
    yield _example("transformed", "moe_permute", arguments, wrt=("x",), checks=TRANSFORMS | {"values", "programs"})
    for name, tokens in (("blocks", 64), ("blocks-and-a-tail", 75)):
        call = partial(permute_arguments, tokens, 2, 24)
        yield _example(name, "moe_permute", call, wrt=("x",), checks=frozenset({"configurations"}))
    tiny = partial(permute_arguments, 3, 2, 2)
    derivatives = frozenset({"values", "forward_mode", "jacrev_of_jacrev"})
    yield _example("tiny", "moe_permute", tiny, wrt=("x",), checks=derivatives)
    twice = partial(permute_arguments, 4, 2, 6)
    yield _example("sharded-twice", "moe_permute", twice, wrt=("x",), checks=SHARDED_TWICE)
    for tokens, k, dim in LAYERS:
        yield _large("moe_permute", tokens, k, dim, ("x",))


def combine_examples() -> Iterator[Example]:
    """The examples of ``moe_combine``."""
    for tokens, k, dim in SHAPES:
        for dtype in ("float32", "bfloat16", "float16", "float64"):
            arguments = partial(combine_arguments, tokens, k, dim)
            yield _example(f"{tokens}x{k}x{dim}-{dtype}", "moe_combine", arguments, dtype=dtype, wrt=("y", "weights"))
    wide = lambda draw: _with_float32_weights(combine_arguments(33, 4, 70, draw))
    yield _example("weights-in-float32", "moe_combine", wide, dtype="bfloat16", wrt=("y", "weights"))
    arguments = partial(combine_arguments, 12, 2, 8)
    checks = TRANSFORMS | {"values", "programs"}
    yield _example("transformed", "moe_combine", arguments, wrt=("y", "weights"), checks=checks)
    for name, tokens in (("blocks", 64), ("blocks-and-a-tail", 75)):
        call = partial(combine_arguments, tokens, 2, 24)
        yield _example(name, "moe_combine", call, wrt=("y", "weights"), checks=frozenset({"configurations"}))
    tiny = partial(combine_arguments, 3, 2, 2)
    derivatives = frozenset({"values", "forward_mode", "jacrev_of_jacrev"})
    yield _example("tiny", "moe_combine", tiny, wrt=("y", "weights"), checks=derivatives)
    twice = partial(combine_arguments, 4, 2, 6)
    yield _example("sharded-twice", "moe_combine", twice, wrt=("y", "weights"), checks=SHARDED_TWICE)
    for tokens, k, dim in LAYERS:
        yield _large("moe_combine", tokens, k, dim, ("y", "weights"))


def permute_arguments(tokens: int, k: int, dim: int, draw: int) -> Arguments:
    return {"x": normal("x", draw, (tokens, dim)), "token_order": permutation(draw, tokens * k), "k": k}


def combine_arguments(tokens: int, k: int, dim: int, draw: int) -> Arguments:
    return {
        "y": normal("y", draw, (tokens * k, dim)),
        "token_order": permutation(draw, tokens * k),
        "weights": normal("weights", draw, (tokens, k)),
    }


def _with_float32_weights(arguments: Arguments) -> Arguments:
    return arguments | {"weights": arguments["weights"].astype(np.float32)}


def _large(op: str, tokens: int, k: int, dim: int, wrt: tuple[str, ...]) -> Example:
    """A call that is measured."""

    def arguments(draw: int) -> Arguments:
        keys = jax.random.split(jax.random.key(draw), 3)
        order = jax.random.permutation(keys[0], tokens * k).astype(jnp.int32)
        if op == "moe_permute":
            return {"x": jax.random.normal(keys[1], (tokens, dim), jnp.bfloat16), "token_order": order, "k": k}
        y = jax.random.normal(keys[1], (tokens * k, dim), jnp.bfloat16)
        return {"y": y, "token_order": order, "weights": jax.random.uniform(keys[2], (tokens, k), jnp.float32)}

    name = f"{tokens} tokens, {k} experts, {dim}"
    uses = frozenset({"benchmark"})
    return Example(name, op, arguments, "bfloat16", wrt, checks=frozenset(), uses=uses)


def _example(name: str, op: str, arguments: Callable[[int], Arguments], **fields: Any) -> Example:
    return Example(name, op, arguments, features=frozenset({fields.get("dtype", "float32")}), **fields)


def permutation(draw: int, size: int) -> Any:
    """A permutation, which depends only on the draw and the size."""
    return np.random.default_rng([draw, size]).permutation(size).astype(np.int32)


def normal(name: str, draw: int, shape: tuple[int, ...]) -> Any:
    """Normally distributed numbers, which depend only on the name, the draw and the shape."""
    return np.random.default_rng([zlib.crc32(name.encode()), draw]).standard_normal(shape)
