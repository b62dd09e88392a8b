"""The examples that every kernel of ``sample_tokens`` is tested on, and the calls that are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Example
from ejkernel_testing import pairwise

Arguments = dict[str, Any]

OP = "sample_tokens"
NUMBERS = ("temperature", "top_k", "top_p", "min_p")
#: Each row of the grid has one of them.
DTYPES = ("float32", "bfloat16", "float16", "float64")
FACTORS: dict[str, Sequence[Any]] = {
    "rows": (5, 1, 0, 40),
    "vocabulary": (200, 1, 7, 1000),
    "temperature": (None, 0.7, "rows"),
    "top_k": (None, 5, "rows"),
    "top_p": (None, 0.8, "rows"),
    "min_p": (None, 0.1, "rows"),
    "return_logprobs": (False, True),
}
#: Each number where rows have their own: those that filter nothing, or leave one token, too.
OF_ROWS = {
    "temperature": np.array([1.0, 0.0, 0.3, 2.5], np.float32),
    "top_k": np.array([3, 0, -1, 1, 10**6, 20], np.int32),
    "top_p": np.array([0.5, 1.0, 0.0, 1.5, 0.95], np.float32),
    "min_p": np.array([0.02, 0.0, -1.0, 1.0, 0.3], np.float32),
}
TRANSFORMS = frozenset({"jit", "vmap", "checkpoint", "shard_map", "sharding"})


def examples() -> Iterator[Example]:
    """Small calls of every kind, and those that are measured."""
    for number, row in enumerate(pairwise(FACTORS)):
        dtype = DTYPES[number % len(DTYPES)]
        yield example(f"grid{number:02}-{dtype}-{row['rows']}x{row['vocabulary']}", partial(grid, row), dtype=dtype)
    for name in NUMBERS:  # a kernel may take one of them alone
        plain: Arguments = {"rows": 9, "vocabulary": 130, name: "rows"}
        yield example(f"{name}-alone", partial(grid, plain))
    yield example("one-key", lambda draw: {"logits": spread(draw, 6, 90), "key": jax.random.key(draw)})
    yield example("ties", _ties)
    yield example("not-finite", _not_finite)
    yield example("far-apart", lambda draw: {**grid(EVERYTHING, draw), "logits": 50 * spread(draw, 8, 64)})
    yield example("transformed", partial(grid, EVERYTHING), checks={"values", *TRANSFORMS})
    wide = {**EVERYTHING, "vocabulary": 5000}
    yield example("blocks-and-a-tail", partial(grid, wide), checks={"configurations"})
    yield from _measured()


EVERYTHING: Arguments = {"rows": 8, "vocabulary": 64, **dict.fromkeys(NUMBERS, "rows"), "return_logprobs": True}


def grid(row: Arguments, draw: int) -> Arguments:
    rows, vocabulary = row["rows"], row["vocabulary"]
    call: Arguments = {"logits": spread(draw, rows, vocabulary), "key": keys(draw, rows)}
    for name in NUMBERS:
        if row.get(name) == "rows":
            call[name] = np.resize(np.roll(OF_ROWS[name], draw), rows)
        elif row.get(name) is not None:
            call[name] = row[name]
    return call | {"return_logprobs": row.get("return_logprobs", False)}


def example(name: str, draw: Callable[[int], Arguments], *, checks: Any = ("values",), **fields: Any) -> Example:
    given = draw(0)
    words = {word for word in (*NUMBERS, "return_logprobs") if given.get(word) is not None and given[word] is not False}
    features = frozenset({fields.get("dtype", "float32"), *words})
    return Example(name, OP, draw, features=features, checks=frozenset(checks), **fields)


def spread(draw: int, rows: int, vocabulary: int) -> Any:
    """Different numbers in each row, far enough apart for the filters of all dtypes to keep the same ones."""
    rng = np.random.default_rng([draw, rows, vocabulary])
    order = rng.permuted(np.broadcast_to(np.arange(vocabulary), (rows, vocabulary)), axis=-1)
    return 8.0 * order / max(vocabulary, 2) - 3.0


def keys(draw: int, rows: int) -> Any:
    return np.random.default_rng([draw, rows, 5]).integers(0, 2**32, (rows, 2), dtype=np.uint32)


def _ties(draw: int) -> Arguments:
    """Whole numbers, of which many are equal: all that equal the last one of a filter are kept."""
    call = grid({**EVERYTHING, "rows": 30, "vocabulary": 40}, draw)
    return {**call, "logits": np.round(call["logits"])}


def _not_finite(draw: int) -> Arguments:
    """Words without a finite logit are not drawn; a row without any has -1, and an inf is drawn."""
    call = grid({**EVERYTHING, "rows": 12, "vocabulary": 30}, draw)
    logits = call["logits"].copy()
    logits[1:, 3:20], logits[2:, 25] = -np.inf, np.nan
    logits[5], logits[6] = -np.inf, np.nan
    logits[7, 11] = logits[8, 2] = np.inf
    return {**call, "logits": logits}


def _measured() -> Iterator[Example]:
    for rows, vocabulary in ((64, 131072), (1, 131072), (256, 151936), (16, 32000)):
        draw = partial(large, rows, vocabulary)
        uses = frozenset({"benchmark", *(("resources", "vmem", "estimate") if rows == 64 else ())})
        yield Example(f"{rows} x {vocabulary}", OP, draw, checks=frozenset(), uses=uses)


def large(rows: int, vocabulary: int, draw: int, **numbers: Any) -> Arguments:
    """Logits as of a model, with both filters of most servers."""
    logits = 4 * jax.random.normal(jax.random.key(draw), (rows, vocabulary), jnp.float32)
    return {"logits": logits, "key": jax.random.key(draw + 1), "top_k": 50, "top_p": 0.9, **numbers}
