"""``jax.vmap`` of a call: one call on a larger batch where the operation says how, else a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ._jax_versions import explicit_spec, is_sharded, leading_over, vary_alike
from ._request import Request, request

Bind = Callable[[Request, Sequence[Any]], tuple[Any, ...]]


def batch(asked: Request, arrays: Sequence[Any], axes: Sequence[int | None], bind: Bind) -> tuple[Any, ...]:
    """The results of one call for each index of the mapped axes, stacked along axis 0."""
    leading = [
        array if axis is None else jnp.moveaxis(array, axis, 0) for array, axis in zip(arrays, axes, strict=True)
    ]
    mapped = [axis is not None for axis in axes]
    sharded = next((a for a, yes in zip(leading, mapped, strict=True) if yes and explicit_spec(a)[0] is not None), None)
    if sharded is not None:
        return _over_devices(asked, leading, mapped, sharded, bind)
    size = next(array.shape[0] for array, yes in zip(leading, mapped, strict=True) if yes)
    return _folded(asked, leading, mapped, size, bind) or _looped(asked, leading, mapped, bind)


def _over_devices(
    asked: Request, arrays: Sequence[Any], mapped: Sequence[bool], sharded: Any, bind: Bind
) -> tuple[Any, ...]:
    """Every device takes its own part of the mapped axis, which is that of ``sharded`` for all: a loop could not walk
    over what others have.
    """
    mesh, over = jax.typeof(sharded).sharding.mesh, explicit_spec(sharded)[0]
    specs = tuple(PartitionSpec(over) if yes else PartitionSpec() for yes in mapped)

    def own(*parts: Any) -> tuple[Any, ...]:
        return batch(asked, vary_alike(parts), [0 if yes else None for yes in mapped], bind)

    placed = [leading_over(array, mesh, over, yes) for array, yes in zip(arrays, mapped, strict=True)]
    names = set(over) if isinstance(over, tuple) else {over}
    run = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(over), axis_names=names)
    results: tuple[Any, ...] = run(*placed)
    return results


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
