"""What the compiler for TPUs compiles: both dtypes, few rows and many, vocabularies that fill no register."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from ejkernel_core import Example
from ejkernel_ops.sample_tokens.examples import OP, large

NUMBERS: dict[str, Any] = {"temperature": 0.7, "min_p": 0.05, "return_logprobs": True}
#: By name: the rows, the vocabulary, the dtype, and what is changed of both filters.
CALLS: dict[str, tuple[int, int, str, dict[str, Any]]] = {
    "bfloat16": (64, 131072, "bfloat16", {}),
    "all arguments": (64, 128256, "float32", NUMBERS),
    "all arguments in bfloat16": (100, 151936, "bfloat16", NUMBERS),
    "one row": (1, 131072, "float32", NUMBERS),
    "five rows in bfloat16": (5, 131072, "bfloat16", NUMBERS),
    "words that fill no register": (20, 50257, "float32", NUMBERS),
    "a long vocabulary": (16, 262144, "float32", {}),
    "one word": (8, 1, "float32", NUMBERS),
    "top-k alone": (64, 131072, "float32", {"top_p": None}),
    "no filter": (64, 131072, "float32", {"top_k": None, "top_p": None}),
}


def examples() -> Iterator[Example]:
    for name, (rows, vocabulary, dtype, changes) in CALLS.items():
        draw = partial(_arguments, rows, vocabulary, dtype, changes)
        yield Example(name, OP, draw, dtype, checks=frozenset(), uses=frozenset({"vmem"}))


def _arguments(rows: int, vocabulary: int, dtype: str, changes: dict[str, Any], draw: int) -> dict[str, Any]:
    """The numbers of each row are arrays, as those of requests are."""
    call = large(rows, vocabulary, draw, **changes)
    call["logits"] = call["logits"].astype(dtype)
    given = {name: value for name, value in call.items() if value is not None}
    return {name: np.full(rows, value) if type(value) in (int, float) else value for name, value in given.items()}
