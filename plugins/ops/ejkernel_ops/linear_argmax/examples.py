"""The examples that every kernel of ``linear_argmax`` is tested on: small integers, whose products are exact, so that
there are ties and no kernel may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np

from ejkernel_core import Example
from ejkernel_ops.fused_linear_cross_entropy.examples import (
    DTYPES,
    Arguments,
    Call,
    _with,
    features,
    head_call,
    normal,
)
from ejkernel_ops.fused_linear_cross_entropy.sizes import HEADS
from ejkernel_testing import pairwise

OP = "linear_argmax"
FACTORS: dict[str, Sequence[Any]] = {
    "shape": ((3, 7), (130,), (1,), (2, 0, 3)),
    "hidden_dim": (64, 1, 40),
    "vocab": (128, 1, 2, 301),
    "transpose": (False, True),
    "bias": (False, True),
    "logits_soft_cap": (None, 1e4),
}


def examples() -> Iterator[Example]:
    """The examples of ``linear_argmax``."""
    for number, row in enumerate(pairwise(FACTORS)):
        sizes = row["shape"], row["hidden_dim"], row["vocab"], row["transpose"], row["bias"]
        arguments = partial(_with, partial(call, *sizes), {"logits_soft_cap": row["logits_soft_cap"]})
        label = "x".join(map(str, (*row["shape"], row["hidden_dim"], row["vocab"])))
        yield example(f"grid{number:02}-{label}", arguments, dtype=DTYPES[number % len(DTYPES)])
    yield example("all-equal", lambda draw: {"hidden": np.zeros((5, 8)), "weight": normal("weight", draw, (8, 40))})
    yield example("the-last-word", lambda draw: call((5,), 8, 40, False, False, draw) | {"bias": np.arange(40.0) * 99})
    yield example("words-that-cannot-be", _impossible_words)
    transforms = {"jit", "vmap", "vmap_of_other_axes", "checkpoint"}
    yield example("plain", partial(call, (2, 5), 8, 40, False, False), checks={"values", *transforms})
    yield example("sharded", partial(call, (8, 4), 8, 40, False, True), checks={"values", "sharding", "shard_map"})
    for name, shape in (("blocks", (128,)), ("blocks-and-a-tail", (3, 67))):
        arguments = partial(call, shape, 16, 96, False, False)
        yield example(f"plain-{name}", arguments, checks={"configurations"})
    base = partial(call, (2, 5), 8, 40, False, True)
    changes: dict[str, Arguments] = {"other-weight": {"weight": -base(0)["weight"]}, "without-bias": {"bias": None}}
    variations = tuple(example(name, partial(_with, base, change)) for name, change in changes.items())
    yield example("one-at-a-time", base, checks={"values", "sensitivity"}, variations=variations)
    yield _of_a_model()


def _of_a_model() -> Example:
    loss = head_call(OP, HEADS[0])

    def arguments(draw: int) -> Arguments:
        return {name: array for name, array in loss.arguments(draw).items() if name != "labels"}

    return attrs.evolve(loss, arguments=arguments, wrt=(), uses=frozenset({"vmem"}))


def call(
    shape: Sequence[int], hidden_dim: int, vocab: int, is_transposed: bool, has_bias: bool, draw: int
) -> Arguments:
    """Integers of two bits."""
    rng = np.random.default_rng([13, draw])
    weight = rng.integers(-2, 3, (hidden_dim, vocab)).astype(np.float64)
    arguments: Arguments = {"hidden": rng.integers(-2, 3, (*shape, hidden_dim)).astype(np.float64), "weight": weight}
    if is_transposed:
        arguments |= {"weight": np.ascontiguousarray(weight.T), "transpose_weight": True}
    return arguments | ({"bias": rng.integers(-2, 3, vocab).astype(np.float64)} if has_bias else {})


def _impossible_words(draw: int) -> Arguments:
    bias = np.zeros(40)
    bias[:7] = -np.inf
    return call((9,), 8, 40, False, False, draw) | {"bias": bias}


def example(name: str, arguments: Call, *, checks: Iterable[str] = ("values",), **fields: Any) -> Example:
    values = arguments(0)
    words = features({**values, "labels": values["hidden"]}, fields.get("dtype", "float32"))
    return Example(name, OP, arguments, features=words, checks=frozenset(checks), **fields)
