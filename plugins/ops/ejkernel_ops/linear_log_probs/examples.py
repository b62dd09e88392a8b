"""The examples that every kernel of ``linear_log_probs`` is tested on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np

from ejkernel_core import Example
from ejkernel_ops.fused_linear_cross_entropy import examples as loss
from ejkernel_ops.fused_linear_cross_entropy.examples import Arguments, Call, call, normal
from ejkernel_ops.fused_linear_cross_entropy.sizes import HEADS
from ejkernel_testing import pairwise

OP = "linear_log_probs"
FACTORS: dict[str, Sequence[Any]] = {
    **{name: loss.FACTORS[name] for name in ("shape", "hidden_dim", "vocab", "transpose", "bias", "logits_soft_cap")},
    "temperature": (1.0, 0.7),
    "ignored": loss.FACTORS["ignored"],
    "return_entropy": (False, True),
}


def examples() -> Iterator[Example]:
    """The examples of ``linear_log_probs``."""
    for number, row in enumerate(pairwise(FACTORS)):
        dtype = loss.DTYPES[number % len(loss.DTYPES)]
        arguments = partial(grid, row, is_float64=dtype == "float64")
        yield example(f"grid{number:02}-{dtype}-{_label(row)}", arguments, dtype=dtype)
    yield from faults()
    yield from subjects()
    yield attrs.evolve(loss.head_call(OP, HEADS[0]), uses=frozenset({"resources", "vmem"}))


def grid(row: Mapping[str, Any], draw: int, *, is_float64: bool = False) -> Arguments:
    """The arguments of one row of the grid."""
    arguments = loss.grid({**loss_row(row)}, draw, is_float64=is_float64)
    dropped = ("z_loss", "label_smoothing", "token_weights", "vocab_start")
    kept = {name: value for name, value in arguments.items() if name not in dropped}
    return kept | {name: row[name] for name in ("temperature", "return_entropy")}


def loss_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "token_weights": None, "part": False, "z_loss": 0.0, "label_smoothing": 0.0}


def _label(row: Mapping[str, Any]) -> str:
    sizes = "x".join(map(str, (*row["shape"], row["hidden_dim"], row["vocab"])))
    names = [name for name in ("transpose", "bias", "logits_soft_cap", "return_entropy") if row[name]]
    return "-".join([sizes, *names, str(row["temperature"]), row["ignored"]])


def faults() -> Iterator[Example]:
    """Known faults, and the limits of what may be called."""
    calls: dict[str, Call] = {
        "aligned": lambda draw: call(draw, (64,), 64, 512, "none"),
        "one-row": lambda draw: call(draw, (1,), 33, 70, "none"),
        "without-rows": lambda draw: call(draw, (0,), 16, 24),
        "all-ignored": lambda draw: call(draw, (6,), 16, 40, "all"),
        "large-logits": lambda draw: call(draw, (7,), 16, 90) | {"weight": 3e3 * normal("weight", draw, (16, 90))},
        "words-that-cannot-be": loss._impossible_words,
        "many-small-probabilities": loss._small_probabilities,
        "cold": lambda draw: call(draw, (9,), 16, 40) | {"temperature": 0.3},
    }
    for name, arguments in calls.items():
        yield example(name, partial(_with_entropy, arguments))
    for dtype in ("bfloat16", "float16"):
        yield example(f"aligned-{dtype}", partial(_with_entropy, calls["aligned"]), dtype=dtype)


def _with_entropy(arguments: Call, draw: int) -> Arguments:
    return arguments(draw) | {"return_entropy": True}


def everything(draw: int, shape: Sequence[int] = (2, 5)) -> Arguments:
    arguments = call(draw, shape, 24, 32) | {"bias": normal("bias", draw, (32,)), "return_entropy": True}
    return arguments | {"logits_soft_cap": 5.0, "temperature": 0.8}


def subjects() -> Iterator[Example]:
    transforms = {"jit", "vmap", "vmap_of_grad", "grad_of_vmap", "vmap_with_shared", "checkpoint", "scan"}
    for name, arguments in (("everything", everything), ("plain", loss.plain)):
        yield example(name, arguments, checks={"values", "needed", *transforms})
        sharded = partial(arguments, shape=(8, 4))
        yield example(f"{name}-sharded", sharded, checks={"values", "sharding", "shard_map"})
        tiny = partial(_tiny, arguments)
        yield example(f"{name}-tiny", tiny, checks={"values", "forward_mode", "jacrev_of_jacrev"})
        yield example(f"{name}-two-calls", arguments, checks={"values", "programs"})
        yield example(f"{name}-sharded-twice", partial(arguments, shape=(4, 2)), checks={"sharded_derivatives"})
    for name, sizes in (("rows", ((4096,), 8, 16)), ("words", ((5,), 8, 8192))):
        arguments = partial(loss._sized, *sizes)
        yield example(f"sums-over-{name}", arguments, dtype="bfloat16", checks={"accumulation"})
    for name, shape in (("blocks", (128,)), ("blocks-and-a-tail", (3, 67))):
        yield example(f"plain-{name}", partial(loss._sized, shape, 32, 96), checks={"configurations"})
    yield from sensitivity()


def _tiny(arguments: Call, draw: int) -> Arguments:
    values = arguments(draw)
    hidden = values["hidden"].reshape(-1, values["hidden"].shape[-1])[:2, :3]
    small = {"hidden": hidden, "weight": values["weight"][:3, :4], "labels": np.array([1, loss.IGNORED], np.int32)}
    return values | small | ({"bias": values["bias"][:4]} if "bias" in values else {})


def sensitivity() -> Iterator[Example]:
    base = everything(0)
    changes: dict[str, Arguments] = {
        "without-bias": {"bias": None},
        "other-weight": {"weight": -base["weight"]},
        "other-labels": {"labels": (base["labels"] + 1) % 32},
        "cap": {"logits_soft_cap": None},
        "temperature": {"temperature": 1.0},
    }
    variations = tuple(example(name, partial(loss._with, everything, change)) for name, change in changes.items())
    yield example("one-at-a-time", everything, checks={"values", "sensitivity"}, variations=variations)
    other = {"weight": -loss.plain(0)["weight"]}
    variations = (example("other-weight", partial(loss._with, loss.plain, other)),)
    yield example("plain-one-at-a-time", loss.plain, checks={"values", "sensitivity"}, variations=variations)


def example(name: str, arguments: Call, *, checks: Iterable[str] = ("values",), **fields: Any) -> Example:
    values = arguments(0)
    wrt = tuple(array for array in ("hidden", "weight", "bias") if values.get(array) is not None)
    words = loss.features(values, fields.get("dtype", "float32"))
    words |= {"temperature"} if values.get("temperature", 1.0) != 1.0 else frozenset()
    return Example(name, OP, arguments, wrt=wrt, features=words, checks=frozenset(checks), **fields)
