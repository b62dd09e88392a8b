"""Rows in chunks, so that there are never logits of more than one chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from attrs.validators import ge, instance_of, not_
from jax import lax

from ejkernel_core import Invocation
from ejkernel_ops.fused_linear_cross_entropy import definition
from ejkernel_ops.fused_linear_cross_entropy.definition import Labels, rows, vocab

Arrays = Mapping[str, Any]
Step = Callable[[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]

#: The bytes that the logits of a chunk may take, by platform, and the bytes of one: in float32, and once more in 16
#: bits for the products of the gradients. On CPUs the fewer the better, as long as the products are large.
MEMORY = {"cpu": 1 << 25}
MEMORY_ELSEWHERE = 1 << 30
BYTES = 6
#: The fewest rows that the heuristic takes: with fewer, the weight and the sum of its gradient are read too often.
FEWEST = 64


@attrs.frozen
class Rows:
    """The most rows of a chunk: what a configuration of each kernel has."""

    rows: int = attrs.field(default=1024, validator=[instance_of(int), not_(instance_of(bool)), ge(1)])


def rows_of_memory(inv: Invocation) -> int:
    """As many rows as the memory allows, a power of two, and no more than there are."""
    memory = MEMORY.get(inv.platform, MEMORY_ELSEWHERE)
    count = max(memory // (BYTES * vocab(inv)), FEWEST)
    return min(1 << (count.bit_length() - 1), _all_rows(inv))


def neighbours(inv: Invocation) -> list[int]:
    """The heuristic's rows, and half, twice and four times as many, where there are so many."""
    count, most = rows_of_memory(inv), _all_rows(inv)
    return [*dict.fromkeys((count, max(count // 2, 1), min(2 * count, most), min(4 * count, most)))]


def _all_rows(inv: Invocation) -> int:
    """The next power of two of the number of rows, so that calls of a bucket have one space."""
    return 1 << (max(rows(inv), 1) - 1).bit_length()


def rows_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The hidden states and the labels of all rows, with one leading axis."""
    hidden = arguments["hidden"]
    return {"hidden": hidden.reshape(-1, hidden.shape[-1]), **definition.labels_of(arguments)._asdict()}


def labels_of(arrays: Arrays) -> Labels:
    """The labels of a chunk."""
    return Labels(*(arrays[name] for name in Labels._fields))


def over_chunks(step: Step, carry: Any, arrays: Arrays, most: int) -> tuple[Any, dict[str, Any]]:
    """The carry after all chunks of at most this many rows, and what each row gives.

    ``step`` takes the carry and the arrays of a chunk, and returns the carry and its rows of other arrays. A row of
    zeros, which a last chunk may have, has to change nothing.

    >>> carry, out = over_chunks(lambda total, a: (total + a["x"].sum(), {"y": 2 * a["x"]}), 0, {"x": jnp.arange(5)}, 2)
    >>> int(carry), out["y"]
    (10, Array([0, 2, 4, 6, 8], dtype=int32))
    """
    count = next(iter(arrays.values())).shape[0]
    chunks = number_of_chunks(count, most)
    if chunks <= 1:
        return step(carry, dict(arrays))
    size = -(-count // chunks)
    # Row by row they belong to one chunk after another: so each device has rows of all, where the rows are sharded.
    by_chunk = {
        name: _padded(array, size * chunks).reshape(size, chunks, *array.shape[1:]) for name, array in arrays.items()
    }

    def chunk_of(number: Any) -> dict[str, Any]:
        return {name: lax.dynamic_index_in_dim(array, number, 1, keepdims=False) for name, array in by_chunk.items()}

    def next_chunk(state: tuple[Any, dict[str, Any]], number: Any) -> tuple[Any, None]:
        new_carry, results = step(state[0], chunk_of(number))
        updated = {n: lax.dynamic_update_index_in_dim(state[1][n], r, number, 1) for n, r in results.items()}
        return (new_carry, updated), None

    shapes = jax.eval_shape(lambda carry: step(carry, chunk_of(0))[1], carry)
    empty = {name: jnp.zeros((size, chunks, *row.shape[1:]), row.dtype) for name, row in shapes.items()}
    (carry, results), _ = lax.scan(next_chunk, (carry, empty), jnp.arange(chunks, dtype=jnp.int32))
    return carry, {name: array.reshape(size * chunks, *array.shape[2:])[:count] for name, array in results.items()}


def number_of_chunks(count: int, most: int) -> int:
    """The fewest chunks of at most so many rows, or a few more that are equally long.

    >>> number_of_chunks(1000, 256), number_of_chunks(1000, 300), number_of_chunks(7, 2)
    (4, 4, 4)
    """
    fewest = -(-count // most)
    return next((n for n in range(fewest, fewest + fewest // 4 + 1) if n and count % n == 0), fewest)


def _padded(array: Any, count: int) -> Any:
    return jnp.pad(array, [(0, count - array.shape[0])] + [(0, 0)] * (array.ndim - 1))
