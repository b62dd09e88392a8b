"""``jax.vmap`` of a call: one call on a larger batch where the operation says how, else a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._jax_versions import is_sharded
from ._request import Request, request

Bind = Callable[[Request, Sequence[Any]], tuple[Any, ...]]


def batch(asked: Request, arrays: Sequence[Any], axes: Sequence[int | None], bind: Bind) -> tuple[Any, ...]:
    """The results of one call for each index of the mapped axes, stacked along axis 0."""
    leading = [
        array if axis is None else jnp.moveaxis(array, axis, 0) for array, axis in zip(arrays, axes, strict=True)
    ]
    mapped = [axis is not None for axis in axes]
    size = next(array.shape[0] for array, yes in zip(leading, mapped, strict=True) if yes)
    return _folded(asked, leading, mapped, size, bind) or _looped(asked, leading, mapped, bind)


def _folded(
    asked: Request, arrays: Sequence[Any], mapped: Sequence[bool], size: int, bind: Bind
) -> tuple[Any, ...] | None:
    # Folding merges axes, and an axis that is cut cannot be merged without moving data between devices.
    if asked.operation.fold is None or any(map(is_sharded, arrays)):
        return None
    names = frozenset(name for name, yes in zip(asked.arrays, mapped, strict=True) if yes)
    folded = asked.operation.fold(asked.arguments(arrays), names, size)
    if folded is None:
        return None
    arguments, unfold = folded
    larger, values = request(asked.terms, asked.operation, arguments)
    return tuple(unfold(bind(larger, values)))


def _looped(asked: Request, arrays: Sequence[Any], mapped: Sequence[bool], bind: Bind) -> tuple[Any, ...]:
    def one(slices: Sequence[Any]) -> tuple[Any, ...]:
        rest = iter(slices)
        return bind(asked, [next(rest) if yes else array for array, yes in zip(arrays, mapped, strict=True)])

    moving = [array for array, yes in zip(arrays, mapped, strict=True) if yes]
    results: tuple[Any, ...] = jax.lax.map(one, moving)
    return results
