"""The examples that every kernel of ``moe_route`` is tested on, and the calls that are measured."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Example
from ejkernel_testing import pairwise

Arguments = dict[str, Any]
Row = Mapping[str, Any]

#: Each row of the grid has one of them.
DTYPES = ("float32", "bfloat16", "float16", "float64")
FACTORS: dict[str, Sequence[Any]] = {
    "tokens": (33, 1, 0, 200),
    "experts": ((8, 2), (64, 8), (128, 8), (60, 4), (256, 8), (5, 5), (1, 1)),
    "score": ("softmax", "sigmoid", "softmax_after"),
    "bias": (False, True),
    "groups": (None, (4, 2)),
    "renormalize": (True, False),
    "factor": (1.0, 2.5),
}


def examples() -> Iterator[Example]:
    """The examples of ``moe_route``."""
    yield from faults()
    yield from subjects()
    for number, row in enumerate(pairwise(FACTORS, is_possible)):
        dtype = DTYPES[number % len(DTYPES)]
        yield example(f"grid{number:02}-{dtype}-{_label(row)}", partial(grid, row), dtype=dtype)
    for tokens, experts, k in ((65536, 128, 8), (16384, 128, 8), (16384, 256, 8), (16384, 32, 4), (16384, 8, 2)):
        yield large(tokens, experts, k)
    for tokens in (2048, 64):
        yield large(tokens, 128, 8)


def is_possible(row: Row) -> bool:
    """Groups have as many experts each, and more than a token needs."""
    if row.get("groups") is None or "experts" not in row:
        return True
    (experts, k), (count, chosen) = row["experts"], row["groups"]
    return bool(experts % count == 0 and experts // count * chosen >= k)


def grid(row: Row, draw: int) -> Arguments:
    experts, k = row["experts"]
    arguments: Arguments = {"router_logits": logits(draw, row["tokens"], experts), "k": k, "score": row["score"]}
    if row["bias"]:
        arguments["expert_bias"] = biases(draw, experts)
    if row["groups"] is not None:
        arguments["num_groups"], arguments["group_topk"] = row["groups"]
    return arguments | {"renormalize": row["renormalize"], "scaling_factor": row["factor"]}


def _label(row: Row) -> str:
    experts, k = row["experts"]
    words = [word for word, is_in in (("bias", row["bias"]), ("groups", row["groups"])) if is_in]
    return "-".join([f"{row['tokens']}x{experts}-{k}", row["score"], *words])


def faults() -> Iterator[Example]:
    calls: dict[str, Callable[[int], Arguments]] = {
        # Whole numbers, of which many are equal: the first expert is taken.
        "ties": lambda draw: {"router_logits": np.round(spread("logits", draw, 40, 16)), "k": 5},
        "all-equal": lambda draw: {"router_logits": np.ones((9, 20)), "k": 7, "score": "sigmoid"},
        "far-apart": lambda draw: {"router_logits": 40 * logits(draw, 20, 24), "k": 3},
        "without-some-experts": _without_some,
        "zeros-of-both-signs": lambda draw: {
            "router_logits": 0 * logits(draw, 20, 12),
            "k": 3,
            "score": "softmax_after",
            "num_groups": 4,
            "group_topk": 2,
        },
        "infinite": lambda draw: _infinite(draw, "softmax"),
        "infinite-sigmoid": lambda draw: _infinite(draw, "sigmoid"),
        "infinite-softmax-after": lambda draw: _infinite(draw, "softmax_after"),
        "disabled-in-groups": lambda draw: _disabled(draw, "sigmoid"),
        "disabled-in-groups-softmax-after": lambda draw: _disabled(draw, "softmax_after"),
        "one-expert-for-all": lambda draw: {"router_logits": logits(draw, 70, 12) + 50 * (np.arange(12) == 7), "k": 1},
        "all-experts": lambda draw: {"router_logits": logits(draw, 9, 16), "k": 16, "score": "softmax_after"},
    }
    for name, arguments in calls.items():
        yield example(name, arguments)


def _without_some(draw: int) -> Arguments:
    """-inf and NaN never beat a finite score; they are chosen where there is no other."""
    numbers = logits(draw, 30, 8)
    numbers[:, 2], numbers[:, 5] = -np.inf, np.nan
    numbers[4, :6] = -np.inf
    return {"router_logits": numbers, "k": 3}


def _disabled(draw: int, score: str) -> Arguments:
    """No expert of another group is chosen, where those of the best group are disabled.

    Each group has two that are not, and three are chosen: the third is a disabled one of the best group.
    """
    bias = biases(draw, 16)
    bias[[1, 2, 4, 5, 8, 10, 13, 14]] = -np.inf
    numbers = logits(draw, 30, 16)
    numbers[:9, 12:] = -np.inf
    groups = {"num_groups": 4, "group_topk": 1}
    return {"router_logits": numbers, "k": 3, "score": score, "expert_bias": bias, **groups}


def _infinite(draw: int, score: str) -> Arguments:
    """An inf counts as the largest number, so that it is chosen, and weights are numbers."""
    numbers = logits(draw, 20, 8)
    numbers[3:9, 2], numbers[6:12, 5], numbers[8, :] = np.inf, np.inf, np.inf
    return {"router_logits": numbers, "k": 3, "score": score}


def subjects() -> Iterator[Example]:
    for score in ("sigmoid", "softmax"):  # a kernel may take one of them alone
        yield from plain_subjects(score)
    base = {"num_groups": 4, "group_topk": 2, "expert_bias": biases(0, 16)}

    def everything(draw: int) -> Arguments:
        return {"router_logits": logits(draw, 20, 16), "k": 4, "score": "sigmoid", **base}

    changes: dict[str, Arguments] = {
        "without-bias": {"expert_bias": None},
        "other-groups": {"num_groups": 2, "group_topk": 1},
        "three-groups": {"group_topk": 3},
        "softmax": {"score": "softmax"},
        "not-renormalized": {"renormalize": False},
        "factor": {"scaling_factor": 3.0},
        "softmax-after": {"score": "softmax_after"},
    }
    variations = tuple(example(name, partial(_with, everything, change)) for name, change in changes.items())
    yield example("one-at-a-time", everything, checks={"values", "sensitivity"}, variations=variations)


def plain_subjects(score: str) -> Iterator[Example]:
    """Each check on a call without a bias and without groups, by one of the scores."""
    small, tiny = partial(_scored, score, 12, 8), partial(_scored, score, 2, 4)
    transforms = {"jit", "vmap", "vmap_of_grad", "grad_of_vmap", "checkpoint", "scan", "programs"}
    yield example(f"plain-transformed-{score}", small, checks={"values", *transforms})
    yield example(f"plain-tiny-{score}", tiny, checks={"values", "forward_mode", "jacrev_of_jacrev"})
    twice = partial(_scored, score, 4, 8)
    yield example(f"plain-sharded-twice-{score}", twice, checks={"sharded_derivatives"})
    changes: dict[str, Arguments] = {"not-renormalized": {"renormalize": False}, "factor": {"scaling_factor": 3.0}}
    variations = tuple(example(name, partial(_with, small, change)) for name, change in changes.items())
    for name, tokens, experts in (("blocks", 32, 16), ("blocks-and-a-tail", 37, 24)):
        arguments = partial(_scored, score, tokens, experts)
        yield example(f"plain-{name}-{score}", arguments, checks={"configurations"})
    yield example(f"plain-one-at-a-time-{score}", small, checks={"values", "sensitivity"}, variations=variations)


def _scored(score: str, tokens: int, experts: int, draw: int) -> Arguments:
    return {"router_logits": logits(draw, tokens, experts), "k": 2, "score": score}


def _with(arguments: Callable[[int], Arguments], changes: Arguments, draw: int) -> Arguments:
    return arguments(draw) | changes


def large(tokens: int, experts: int, k: int) -> Example:
    """A call that is measured, with float32 logits as routers have them."""

    def arguments(draw: int) -> Arguments:
        return {"router_logits": jax.random.normal(jax.random.key(draw), (tokens, experts), jnp.float32), "k": k}

    uses = frozenset({"benchmark", *(("resources", "vmem", "estimate") if tokens == 16384 and experts == 128 else ())})
    return Example(f"{tokens} tokens, {k} of {experts}", "moe_route", arguments, checks=frozenset(), uses=uses)


def example(
    name: str, arguments: Callable[[int], Arguments], *, checks: Iterable[str] = ("values",), **fields: Any
) -> Example:
    call = arguments(0)
    present = {word for word in ("expert_bias", "num_groups") if call.get(word) is not None}
    features = frozenset({fields.get("dtype", "float32"), call.get("score", "softmax"), *present})
    return Example(
        name, "moe_route", arguments, wrt=("router_logits",), features=features, checks=frozenset(checks), **fields
    )


def biases(draw: int, experts: int) -> Any:
    """Biases that change the choice, of which no sum with a logit equals another by rounding."""
    rng = np.random.default_rng([draw, experts])
    step = 4.0 / max(experts, 2)
    return step * (rng.integers(-3, 4, experts) + np.arange(experts) / (2 * experts))


def logits(draw: int, tokens: int, experts: int) -> Any:
    return spread("logits", draw, tokens, experts)


def spread(name: str, draw: int, *shape: int) -> Any:
    """Different numbers in each row, far enough apart for float16 and bfloat16 not to make them equal."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), draw])
    size = shape[-1]
    rows = rng.permuted(np.broadcast_to(np.arange(size), shape), axis=-1)
    return 4.0 * rows / max(size, 2) - 2.0
