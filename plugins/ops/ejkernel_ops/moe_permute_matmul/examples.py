"""The examples that kernels of ``moe_permute_matmul`` are tested on, and the calls that are measured.

The product is that of ``grouped_matmul``, and so are the sizes of its groups and its options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Example
from ejkernel_ops.grouped_matmul import examples as grouped_matmul
from ejkernel_ops.grouped_matmul.samples import group_sizes
from ejkernel_ops.grouped_matmul.sizes import MODELS, TOKENS, Model
from ejkernel_ops.moe_permute.examples import normal, permutation
from ejkernel_testing import pairwise

from .operation import routed_order

Arguments = dict[str, Any]

#: The sum of a bias' gradient over many rows may be nearly 0, so that its rounding is large: not in all of ten columns.
FACTORS = {**grouped_matmul.FACTORS, "n": (32, 10, 74, 144, 300), "chosen": (2, 1, 3, 8)}
DIFFERENTIABLE = ("x", "rhs", "rhs_bias")


def examples() -> Iterator[Example]:
    """The examples of ``moe_permute_matmul``."""
    for number, row in enumerate(pairwise(FACTORS)):
        dtype = grouped_matmul.DTYPES[number % len(grouped_matmul.DTYPES)]
        arguments = partial(_grid, row, is_float64=dtype == "float64")
        name = f"grid{number:02}-{dtype}-{row['chosen']}-of-{row['sizes']}-{row['k']}x{row['n']}"
        yield example(name, arguments, dtype=dtype)
    yield from _subjects()
    yield from _plain_subjects()
    yield from (_up_call(model, tokens) for model in MODELS for tokens in TOKENS)


def _grid(row: grouped_matmul.Row, draw: int, *, is_float64: bool) -> Arguments:
    return _of_tokens(grouped_matmul.grid(row, draw, is_float64=is_float64), row["chosen"], draw)


def _of_tokens(product: Arguments, k: int, draw: int) -> Arguments:
    """The call on tokens in place of the rows of a product. There are as many rows, or a few more without a group."""
    rows, dim = product.pop("lhs").shape
    tokens = math.ceil(rows / k)
    return {"x": normal("x", draw, (tokens, dim)), "token_order": permutation(draw, tokens * k), **product, "k": k}


def everything(draw: int, activation: str | None = "silu_gated") -> Arguments:
    """A call with all that most calls have: groups of several sizes, a bias and an activation."""
    return _of_tokens(grouped_matmul.everything(draw, activation=activation), 2, draw)


def _subjects() -> Iterator[Example]:
    """Subjects for transformations and sensitivity, and the limits of what may be called."""
    transforms = {"jit", "vmap", "vmap_of_grad", "grad_of_vmap", "checkpoint", "scan"}
    yield example("everything", everything, checks={"values", *transforms})
    yield example("two-calls", everything, checks={"values", "programs"})
    yield example("sharded", partial(everything, activation=None), checks={"values", "sharding"})
    twice = lambda draw: _of_tokens(
        grouped_matmul.call(draw, (5, 3), 4, 6) | {"rhs_bias": normal("rhs_bias", draw, (2, 6))}, 2, draw
    )
    yield example("sharded-twice", twice, checks={"sharded_derivatives"}, long=True)
    yield example("tiny", _tiny, checks={"values", "forward_mode", "jacrev_of_jacrev"})
    yield example("infinite-without-group", _infinite_without_group, wrt=("x", "rhs"))
    yield example("without-tokens", lambda draw: _of_tokens(grouped_matmul.call(draw, (0, 0), 16, 24), 2, draw))
    changes: dict[str, Callable[[Arguments], Arguments]] = {
        "other-order": lambda call: {"token_order": call["token_order"][::-1].copy()},
        "other-rhs": lambda call: {"rhs": -call["rhs"]},
        "other-bias": lambda call: {"rhs_bias": -call["rhs_bias"]},
        "other-sizes": lambda call: {"group_sizes": np.array([1, 12, 8], np.int32)},
        "other-activation": lambda call: {"activation": "gelu_gated"},
        "interleaved": lambda call: {"activation": "swiglu_oai"},
        "offset": lambda call: {
            "group_sizes": np.array([3, 9, 0, 10], np.int32),
            "group_offset": np.array([1], np.int32),
        },
    }
    variations = tuple(example(name, partial(_changed, change)) for name, change in changes.items())
    yield example("one-at-a-time", everything, checks={"values", "sensitivity"}, variations=variations)


def _plain_subjects() -> Iterator[Example]:
    """Each check on a call without a bias, an activation, an offset and rows of no group."""
    transforms = {"jit", "vmap", "vmap_of_grad", "grad_of_vmap", "checkpoint", "scan", "sharding"}
    yield example("plain-transformed", _plain, checks={"values", *transforms})
    yield example("plain-two-calls", _plain, checks={"values", "programs"})
    tiny = lambda draw: _of_tokens(grouped_matmul.call(draw, (2, 2), 3, 4), 2, draw)
    yield example("plain-tiny", tiny, checks={"values", "forward_mode", "jacrev_of_jacrev"})
    changes: dict[str, Callable[[Arguments], Arguments]] = {
        "other-order": lambda call: {"token_order": call["token_order"][::-1].copy()},
        "other-rhs": lambda call: {"rhs": -call["rhs"]},
    }
    variations = tuple(example(name, partial(_changed, change, call=_plain)) for name, change in changes.items())
    yield example("plain-one-at-a-time", _plain, checks={"values", "sensitivity"}, variations=variations)
    blocks = lambda draw: _of_tokens(grouped_matmul.call(draw, (64, 64), 64, 64), 2, draw)
    yield example("plain-blocks", blocks, checks={"configurations"})
    tail = lambda draw: _of_tokens(grouped_matmul.call(draw, (170, 0, 120), 40, 72), 2, draw)
    yield example("plain-blocks-and-a-tail", tail, checks={"configurations"})


def _plain(draw: int) -> Arguments:
    return _of_tokens(grouped_matmul.call(draw, (4, 0, 6), 16, 24), 2, draw)


def _changed(
    change: Callable[[Arguments], Arguments], draw: int, call: Callable[[int], Arguments] = everything
) -> Arguments:
    arguments = call(draw)
    return arguments | change(arguments)


def _tiny(draw: int) -> Arguments:
    product = grouped_matmul.call(draw, (2, 2), 3, 4)
    return _of_tokens(product, 2, draw) | {"activation": "gelu_gated"}


def _infinite_without_group(draw: int) -> Arguments:
    """The last tokens belong to no group, and a matrix to no token: what they hold must not matter."""
    arguments = _of_tokens(grouped_matmul.call(draw, (30, 0, 24), 40, 48, rest=14), 2, draw)
    order = np.concatenate([np.random.default_rng(draw).permutation(54), np.arange(54, 68)])
    arguments["x"][27:] = np.inf
    arguments["rhs"][1] = np.nan
    return arguments | {"token_order": order.astype(np.int32)}


def _up_call(model: Model, tokens: int) -> Example:
    """The product of a layer with its gates and values, in bfloat16."""

    def arguments(draw: int) -> Arguments:
        keys = jax.random.split(jax.random.key(draw), 4)
        rows = tokens * model.chosen
        sizes = group_sizes(keys[2], rows, model.experts)
        return {
            "x": jax.random.normal(keys[0], (tokens, model.dim), jnp.bfloat16),
            "token_order": routed_order(keys[3], sizes, rows),
            "rhs": jax.random.normal(keys[1], (model.experts, model.dim, 2 * model.inner), jnp.bfloat16),
            "group_sizes": sizes,
            "k": model.chosen,
        }

    return Example(
        f"{model.name}, {tokens} tokens",
        "moe_permute_matmul",
        arguments,
        "bfloat16",
        ("x", "rhs") if tokens == max(TOKENS) else (),
        checks=frozenset(),
        uses=frozenset({"benchmark", *(("resources",) if (model.name, tokens) in RESOURCES else ())}),
    )


#: Whose configurations are compiled without a device: of many rows, and of few.
RESOURCES = {("Qwen3-30B-A3B", 16384), ("Qwen3-30B-A3B", 64)}


def example(
    name: str, arguments: Callable[[int], Arguments], *, checks: Iterable[str] = ("values",), **fields: Any
) -> Example:
    values = arguments(0)
    fields.setdefault("wrt", tuple(array for array in DIFFERENTIABLE if values.get(array) is not None))
    features = grouped_matmul.features(values, fields.get("dtype", "float32"), "rhs_bias", "group_offset")
    return Example(name, "moe_permute_matmul", arguments, features=features, checks=frozenset(checks), **fields)
