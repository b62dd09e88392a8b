"""The examples on which kernels are proved on one device. The tests of this package prove them on several."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from ejkernel_core import Example

#: (batch, length, heads, key heads, head_dim, value's head_dim)
Shape = tuple[int, int, int, int, int, int]
SMALL: Shape = (2, 6, 4, 2, 8, 8)


def examples() -> Iterator[Example]:
    """Calls in which the sequence is sharded over no axis."""
    yield example("causal", (1, 37, 4, 2, 16, 24), causal=True)
    yield example("causal-bfloat16", (2, 33, 4, 4, 16, 16), "bfloat16", causal=True)
    yield example("full-capped", (2, 19, 6, 1, 16, 16), softmax_scale=0.3, logits_soft_cap=2.0, return_lse=True)
    yield example("window-sinks", (1, 21, 4, 2, 16, 16), causal=True, sliding_window=(5, 0), softmax_aux=2)
    transforms = frozenset({"values", "jit", "vmap", "checkpoint", "scan"})
    yield example("transformed", SMALL, causal=True, checks=transforms)


def example(
    name: str, shape: Shape, dtype: str = "float32", checks: Any = frozenset({"values"}), **options: Any
) -> Example:
    """An example of this shape."""
    wrt = ("query", "key", "value", *(("softmax_aux",) if "softmax_aux" in options else ()))
    draw = partial(arguments, shape, options)
    return Example(name, "context_attention", draw, dtype=dtype, wrt=wrt, checks=checks)


def arguments(shape: Shape, options: dict[str, Any], draw: int) -> dict[str, Any]:
    """The arguments of an example; ``softmax_aux`` is the number of sinks of each head."""
    batch, length, heads, kv_heads, dim, value_dim = shape
    numbers = np.random.default_rng([draw, *shape])
    arrays = {
        "query": numbers.standard_normal((batch, length, heads, dim)),
        "key": numbers.standard_normal((batch, length, kv_heads, dim)),
        "value": numbers.standard_normal((batch, length, kv_heads, value_dim)),
    }
    if "softmax_aux" in options:
        arrays["softmax_aux"] = numbers.standard_normal((heads, options["softmax_aux"]))
    return {**options, **arrays, "axis": ()}
