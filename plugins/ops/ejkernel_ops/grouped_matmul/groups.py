"""Which rows belong to which group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def boundaries(arguments: Mapping[str, Any]) -> jax.Array:
    """The row where each group of ``rhs`` begins, and the row after the last one: int32 ``[groups + 1]``.

    >>> from types import SimpleNamespace
    >>> rhs, lhs = SimpleNamespace(shape=(2, 8, 8)), SimpleNamespace(shape=(12, 8))
    >>> arguments = {"lhs": lhs, "rhs": rhs, "group_sizes": jnp.array([3, 0, 4, 2]), "group_offset": jnp.array([1])}
    >>> boundaries(arguments)
    Array([3, 3, 7], dtype=int32)

    They are within the rows there are, whatever the sizes: a kernel may read any row between two of them. A group of
    ``rhs`` that is none of ``group_sizes`` is empty.
    """
    sizes, offset = arguments["group_sizes"], arguments["group_offset"]
    ends = jnp.clip(jnp.cumsum(sizes, dtype=jnp.int32), 0, arguments["lhs"].shape[0])
    starts_and_end = jax.lax.cummax(jnp.concatenate([jnp.zeros(1, jnp.int32), ends]))
    if offset is None:
        return starts_and_end
    groups = offset[0] + jnp.arange(arguments["rhs"].shape[0] + 1, dtype=jnp.int32)
    return jnp.take(starts_and_end, groups, mode="clip")


def row_groups(starts_and_end: jax.Array, rows: int) -> jax.Array:
    """The group of each row; -1 before the first group and the number of groups after the last.

    >>> row_groups(jnp.array([1, 1, 3], jnp.int32), 4)
    Array([-1,  1,  1,  2], dtype=int32)
    """
    places = jnp.arange(rows, dtype=jnp.int32)
    return jnp.searchsorted(starts_and_end, places, side="right").astype(jnp.int32) - 1
