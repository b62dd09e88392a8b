"""The examples that every kernel of the loss is tested on, and the calls that are measured."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from ejkernel_core import Example
from ejkernel_testing import pairwise

from .sizes import HEADS, Head

Arguments = dict[str, Any]
Row = Mapping[str, Any]
Call = Callable[[int], Arguments]

ROWS = "fused_linear_cross_entropy"
SUM = "fused_linear_cross_entropy_sum"
IGNORED = -100
DIFFERENTIABLE = ("hidden", "weight", "bias", "token_weights")
#: Shapes of the labels; sizes that are not multiples of a block; where labels are ignored.
FACTORS: dict[str, Sequence[Any]] = {
    "shape": ((3, 7), (130,), (1,), (2, 0, 3), (5, 2, 9)),
    "hidden_dim": (64, 1, 40, 200),
    "vocab": (128, 2, 300, 1001),
    "transpose": (False, True),
    "bias": (None, "own", "float32"),
    "token_weights": (None, "own", "float32"),
    "logits_soft_cap": (None, 3.0),
    "z_loss": (0.0, 1e-2),
    "label_smoothing": (0.0, 0.1),
    "ignored": ("none", "some", "ends", "all"),
    "part": (False, True),
}
#: Each row of the grid has one of them, so that a pair of other values meets several.
DTYPES = ("float32", "bfloat16", "float16", "float64")


def examples() -> Iterator[Example]:
    """The examples of the loss of each row."""
    yield from _examples(ROWS)


def sum_examples() -> Iterator[Example]:
    """The examples of the loss of all rows."""
    yield from _examples(SUM)
    for name, arguments in (("everything", everything), ("plain", plain)):
        mean = partial(_with, arguments, {"reduction": "mean"})
        yield example(SUM, f"mean-{name}", mean, checks={"values", "jit", "sharding"})
    yield example(SUM, "mean-of-nothing", lambda draw: _with(plain, {"reduction": "mean"}, draw) | _all_ignored(draw))


def _examples(op: str) -> Iterator[Example]:
    yield from faults(op)
    yield from subjects(op)
    for number, row in enumerate(pairwise(FACTORS)):
        dtype = DTYPES[number % len(DTYPES)]
        name = f"grid{number:02}-{dtype}-{_label(row)}"
        yield example(op, name, partial(grid, row, is_float64=dtype == "float64"), dtype=dtype)
    yield from (head_call(op, head) for head in HEADS)


# -- the grid --------------------------------------------------------------------------------------------------------


def grid(row: Row, draw: int, *, is_float64: bool = False) -> Arguments:
    """The arguments of one row of the grid. With ``is_float64``, no array is float32."""
    arguments = call(draw, row["shape"], row["hidden_dim"], row["vocab"], row["ignored"])
    if row["transpose"]:
        arguments |= {"weight": np.ascontiguousarray(arguments["weight"].T), "transpose_weight": True}
    for name, shape in (("bias", (row["vocab"],)), ("token_weights", row["shape"])):
        if row[name] is not None:
            array = np.abs(normal(name, draw, shape)) if name == "token_weights" else normal(name, draw, shape)
            arguments[name] = array.astype(np.float32) if row[name] == "float32" and not is_float64 else array
    if row["part"]:  # a shard that has some of the labels
        arguments["vocab_start"] = np.array([row["vocab"] // 3], np.int32)
    return arguments | {name: row[name] for name in ("logits_soft_cap", "z_loss", "label_smoothing")}


def _label(row: Row) -> str:
    sizes = "x".join(map(str, (*row["shape"], row["hidden_dim"], row["vocab"])))
    names = ("transpose", "bias", "token_weights", "logits_soft_cap", "z_loss", "label_smoothing", "part")
    return "-".join([sizes, *(name for name in names if row[name]), row["ignored"]])


def call(draw: int, shape: Sequence[int], hidden_dim: int, vocab: int, ignored: str = "some") -> Arguments:
    """A call with logits of a few units."""
    return {
        "hidden": normal("hidden", draw, (*shape, hidden_dim)),
        "weight": normal("weight", draw, (hidden_dim, vocab)) * 2 / np.sqrt(hidden_dim),
        "labels": labels(draw, shape, vocab, ignored),
    }


def labels(draw: int, shape: Sequence[int], vocab: int, ignored: str) -> np.ndarray:
    """Labels, of which none, some, those at both ends or all are ignored."""
    rng = np.random.default_rng([11, draw])
    values = rng.integers(0, vocab, tuple(shape), dtype=np.int32)
    flat = values.reshape(-1)
    if ignored == "some":
        flat[rng.random(flat.size) < 0.3] = IGNORED
    elif ignored == "ends" and flat.size:
        flat[:2], flat[-1] = IGNORED, IGNORED
    elif ignored == "all":
        flat[:] = IGNORED
    return values


def _all_ignored(draw: int) -> Arguments:
    return {"labels": labels(draw, (6,), 40, "all")}


# -- one example for each fault --------------------------------------------------------------------------------------


def faults(op: str) -> Iterator[Example]:
    """Known faults of losses, and the limits of what may be called."""
    calls: dict[str, Call] = {
        "aligned": lambda draw: call(draw, (64,), 64, 512, "none"),
        "one-row": lambda draw: call(draw, (1,), 33, 70, "none"),
        "one-word": lambda draw: call(draw, (9,), 8, 1),
        "one-number": lambda draw: call(draw, (5,), 1, 30),
        "without-rows": lambda draw: call(draw, (0,), 16, 24),
        "without-axes": lambda draw: call(draw, (), 16, 24, "none"),
        "all-ignored": lambda draw: call(draw, (6,), 16, 40, "all"),
        # The exponential of these is infinite in every dtype.
        "large-logits": lambda draw: call(draw, (7,), 16, 90) | {"weight": 3e3 * normal("weight", draw, (16, 90))},
        "words-that-cannot-be": _impossible_words,
        "impossible-words-smoothly-capped": lambda draw: _impossible_words(draw) | {"logits_soft_cap": 4.0},
        # Thousands of words have less than a bit of bfloat16 of the probability, and matter together.
        "many-small-probabilities": _small_probabilities,
        "weights-of-0": lambda draw: call(draw, (9,), 16, 40) | {"token_weights": np.arange(9.0) % 3},
        "another-ignore-index": _other_ignore_index,
        "labels-of-other-integers": lambda draw: _with_labels(call(draw, (9,), 16, 40, "none"), np.uint8),
        "a-shard-without-labels": lambda draw: call(draw, (9,), 16, 40) | {"vocab_start": np.array([40], np.int32)},
        "logits-at-their-cap": lambda draw: call(draw, (9,), 16, 40) | {"logits_soft_cap": 0.01},
    }
    for name, arguments in calls.items():
        yield example(op, name, arguments)
    for dtype in ("bfloat16", "float16"):
        for name in ("aligned", "many-small-probabilities"):
            yield example(op, f"{name}-{dtype}", calls[name], dtype=dtype)
    yield example(op, "a-large-vocabulary", lambda draw: call(draw, (5,), 8, 200_003), dtype="bfloat16", long=True)


def _impossible_words(draw: int) -> Arguments:
    arguments = call(draw, (9,), 16, 40, "none")
    bias = normal("bias", draw, (40,))
    bias[::3] = -np.inf
    return arguments | {"bias": bias, "labels": (arguments["labels"] // 3 * 3 + 1) % 40}


def _small_probabilities(draw: int) -> Arguments:
    """One word has most of the probability, and 7e-5 each have 4,000 others."""
    arguments = call(draw, (12,), 16, 4000, "none")
    bias = 0.1 * normal("bias", draw, (4000,)) - 9.2
    bias[0] = 0.0
    return arguments | {"bias": bias, "labels": np.zeros(12, np.int32), "weight": 0.1 * arguments["weight"]}


def _other_ignore_index(draw: int) -> Arguments:
    """The padding is a word that there is."""
    return call(draw, (9,), 16, 5, "none") | {"ignore_index": 0}


def _with_labels(arguments: Arguments, dtype: Any) -> Arguments:
    return arguments | {"labels": arguments["labels"].astype(dtype)}


# -- subjects for transformations, sensitivity and accumulation ------------------------------------------------------


def everything(draw: int, shape: Sequence[int] = (2, 5)) -> Arguments:
    arguments = call(draw, shape, 24, 32) | {"bias": normal("bias", draw, (32,))}
    arguments |= {"logits_soft_cap": 5.0, "z_loss": 1e-2, "label_smoothing": 0.2}
    return arguments | {"token_weights": np.abs(normal("token_weights", draw, tuple(shape)))}


def plain(draw: int, shape: Sequence[int] = (6,)) -> Arguments:
    """A call without anything that a kernel may refuse."""
    return call(draw, shape, 16, 40)


def with_lse(arguments: Call) -> Call:
    return partial(_with, arguments, {"return_lse": True})


def _with(arguments: Call, changes: Arguments, draw: int) -> Arguments:
    return arguments(draw) | changes


def subjects(op: str) -> Iterator[Example]:
    transforms = {"jit", "vmap", "vmap_of_grad", "grad_of_vmap", "checkpoint", "scan"}
    transforms |= {"vmap_of_other_axes"} if op == ROWS else set()
    for name, arguments in (("everything", everything), ("plain", plain)):
        yield example(op, name, arguments, checks={"values", "needed", *transforms})
        yield example(op, f"{name}-with-lse", with_lse(arguments), checks={"values", "jit", "vmap_of_grad"})
        yield example(op, f"{name}-shared", arguments, checks={"vmap_with_shared"}, long=name == "everything")
        sharded = with_lse(partial(arguments, shape=(8, 4)))
        yield example(op, f"{name}-sharded", sharded, checks={"values", "sharding"} | _of_rows(op))
        tiny = partial(_tiny, arguments)
        yield example(op, f"{name}-tiny", tiny, checks={"values", "forward_mode", "jacrev_of_jacrev"})
        yield example(op, f"{name}-two-calls", with_lse(arguments), checks={"values", "programs"})
        twice = partial(arguments, shape=(4, 2))
        yield example(op, f"{name}-sharded-twice", twice, checks={"sharded_derivatives"}, long=name == "everything")
    rows = lambda draw: call(draw, (4096,), 8, 16)
    yield example(op, "sums-over-4096-rows", rows, dtype="bfloat16", checks={"accumulation"})
    words = lambda draw: call(draw, (5,), 8, 8192)
    yield example(op, "sums-over-8192-words", words, dtype="bfloat16", checks={"accumulation"})
    deep = lambda draw: call(draw, (5,), 4096, 16)
    yield example(op, "sums-of-4096", deep, dtype="bfloat16", checks={"accumulation"})
    for name, shape in (("blocks", (128,)), ("blocks-and-a-tail", (3, 67))):
        arguments = partial(_sized, shape, 32, 96)
        yield example(op, f"plain-{name}", arguments, checks={"configurations"})
    yield from sensitivity(op)


def _sized(shape: Sequence[int], hidden_dim: int, vocab: int, draw: int) -> Arguments:
    return call(draw, shape, hidden_dim, vocab)


def _of_rows(op: str) -> set[str]:
    return {"shard_map"} if op == ROWS else set()


def _tiny(arguments: Call, draw: int) -> Arguments:
    call = arguments(draw)
    shape = (2,)
    small = {"hidden": call["hidden"].reshape(-1, call["hidden"].shape[-1])[:2, :3], "weight": call["weight"][:3, :4]}
    small |= {"labels": np.array([1, IGNORED], np.int32)}
    if "bias" in call:
        small |= {"bias": call["bias"][:4], "token_weights": call["token_weights"].reshape(-1)[: shape[0]]}
    return call | small


def sensitivity(op: str) -> Iterator[Example]:
    base = everything(0)
    changes: dict[str, Arguments] = {
        "without-bias": {"bias": None},
        "other-bias": {"bias": -base["bias"]},
        "other-weight": {"weight": -base["weight"]},
        "other-labels": {"labels": (base["labels"] + 1) % 32},
        "other-padding": {"labels": np.where(base["labels"] == IGNORED, 3, base["labels"])},
        "ignore_index": {"ignore_index": int(base["labels"].max())},
        "cap": {"logits_soft_cap": None},
        "z_loss": {"z_loss": 0.0},
        "label_smoothing": {"label_smoothing": 0.0},
        "without-weights": {"token_weights": None},
        "other-weights": {"token_weights": 3 * base["token_weights"]},
        "vocab_start": {"vocab_start": np.array([7], np.int32)},
    } | ({"mean": {"reduction": "mean"}} if op == SUM else {})
    variations = tuple(example(op, name, partial(_with, everything, change)) for name, change in changes.items())
    yield example(op, "one-at-a-time", everything, checks={"values", "sensitivity"}, variations=variations)
    plain_changes: dict[str, Arguments] = {
        "other-weight": {"weight": -plain(0)["weight"]},
        "other-labels": {"labels": (plain(0)["labels"] + 1) % 40},
    }
    variations = tuple(example(op, name, partial(_with, plain, change)) for name, change in plain_changes.items())
    yield example(op, "plain-one-at-a-time", plain, checks={"values", "sensitivity"}, variations=variations)


# -- the calls that are measured, or compiled without a device -------------------------------------------------------


def head_call(op: str, head: Head) -> Example:
    """The loss of a model, in bfloat16."""

    def arguments(draw: int) -> Arguments:
        keys = jax.random.split(jax.random.key(draw), 3)
        weight = jax.random.normal(keys[1], (head.hidden_dim, head.vocab), "bfloat16")
        return {
            "hidden": jax.random.normal(keys[0], (head.tokens, head.hidden_dim), "bfloat16"),
            "weight": (weight / head.hidden_dim**0.5).astype("bfloat16"),
            "labels": jax.random.randint(keys[2], (head.tokens,), 0, head.vocab),
        }

    wrt, uses = ("hidden", "weight"), frozenset(head.uses)
    return Example(head.name, op, arguments, "bfloat16", wrt, checks=frozenset(), uses=uses)


# -- parts of examples ------------------------------------------------------------------------------------------------


def example(op: str, name: str, arguments: Call, *, checks: Iterable[str] = ("values",), **fields: Any) -> Example:
    values = arguments(0)
    fields.setdefault("wrt", tuple(array for array in DIFFERENTIABLE if values.get(array) is not None))
    words = features(values, fields.get("dtype", "float32"))
    return Example(name, op, arguments, features=words, checks=frozenset(checks), **fields)


def features(arguments: Arguments, dtype: str) -> frozenset[str]:
    """The dtype, the arguments that the call has, and "empty" where it has no rows."""
    names = ("bias", "transpose_weight", "token_weights", "logits_soft_cap", "z_loss", "label_smoothing", "vocab_start")
    words = {name for name in names if arguments.get(name) is not None and arguments[name] is not False}
    words -= {name for name in ("z_loss", "label_smoothing") if not arguments.get(name)}
    return frozenset(words | {dtype} | ({"empty"} if not arguments["labels"].size else set()))


def normal(name: str, draw: int, shape: tuple[int, ...]) -> Any:
    """Normally distributed numbers, which depend only on the name, the draw and the shape."""
    return np.random.default_rng([zlib.crc32(name.encode()), draw]).standard_normal(shape)
