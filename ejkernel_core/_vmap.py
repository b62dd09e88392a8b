"""A call that ``jax.vmap`` maps: one call on a larger batch if the operation has ``fold``, else a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ._request import MappedAxis, Request, bind, make_request, without_axes


def batch(arrays: Sequence[Any], axes: Sequence[int | None], *, request: Request) -> tuple[Sequence[Any], list[int]]:
    leading = [
        array if axis is None else jnp.moveaxis(array, axis, 0) for array, axis in zip(arrays, axes, strict=True)
    ]
    mapped = frozenset(name for name, axis in zip(request.arrays, axes, strict=True) if axis is not None)
    results = bind(attrs.evolve(request, mapped=(MappedAxis(mapped), *request.mapped)), leading)
    return results, [0] * len(results)


def run_mapped(request: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a mapped call, by calls without its innermost mapped axis."""
    return _by_folding(request, arrays) or _by_loop(request, arrays)


def _by_folding(request: Request, arrays: Sequence[Any]) -> tuple[Any, ...] | None:
    *outer, axis = request.mapped
    fold = request.operation.fold
    if fold is None:
        return None
    folded_call: list[Any] = []
    size = request.mapped_sizes(arrays)[-1]

    def fold_arrays(*values: Any) -> list[Any]:
        folded = fold(request.arguments(values), axis.arrays, size, axis.sums)
        if folded is None:
            return []
        folded_request, folded_arrays = make_request(request.context, request.operation, folded[0])
        folded_call[:] = folded_request, folded[1]
        return folded_arrays

    folded_avals = jax.eval_shape(fold_arrays, *without_axes(outer, request.arrays, arrays))
    if not folded_avals:
        return None
    folded_request, unfold_all = attrs.evolve(folded_call[0], needed=request.needed), folded_call[1]

    def unfold(results: Sequence[Any]) -> tuple[Any, ...]:
        by_name = folded_request.by_name(results)
        return request.select(unfold_all(folded_request.completed(by_name, folded_avals)))

    for outer_axis in reversed(outer):
        fold_arrays = jax.vmap(
            fold_arrays,
            tuple(0 if name in outer_axis.arrays else None for name in request.arrays),
            [0 if name in outer_axis.arrays else None for name in folded_request.arrays],
        )
        over_results = tuple(None if name in outer_axis.sums else 0 for name in request.results)
        if any(place is not None for place in over_results):  # else all results are sums over this axis
            unfold = jax.vmap(unfold, (over_results,), over_results)
    folded_arrays = fold_arrays(*arrays)
    results = bind(attrs.evolve(folded_request, mapped=tuple(outer)), folded_arrays)
    return tuple(unfold(results))


def _by_loop(request: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    *outer, axis = request.mapped
    element = attrs.evolve(request, mapped=tuple(outer))
    is_mapped = [name in axis.arrays for name in request.arrays]
    is_sum = [name in axis.sums for name in request.results]

    def depth(name: str) -> int:
        """The number of axes in front of this one."""
        return sum(name in outer_axis.arrays for outer_axis in outer)

    slices = [jnp.moveaxis(a, depth(n), 0) for n, a, m in zip(request.arrays, arrays, is_mapped, strict=True) if m]

    def step(totals: Sequence[Any], slices_at_index: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        mapped_arrays = iter(slices_at_index)
        results = bind(element, [next(mapped_arrays) if m else a for a, m in zip(arrays, is_mapped, strict=True)])
        parts = [result for result, is_total in zip(results, is_sum, strict=True) if is_total]
        sums = [total + part for total, part in zip(totals, parts, strict=True)]
        return sums, [result for result, is_total in zip(results, is_sum, strict=True) if not is_total]

    outputs = request.outputs(arrays)
    zeros = [
        jnp.zeros(out.shape, jnp.promote_types(out.dtype, jnp.float32))
        for out, is_total in zip(outputs, is_sum, strict=True)
        if is_total
    ]
    totals, stacked = (iter(values) for values in jax.lax.scan(step, zeros, slices))
    return tuple(
        next(totals).astype(out.dtype)
        if is_total
        else jnp.moveaxis(next(stacked), 0, sum(name not in outer_axis.sums for outer_axis in outer))
        for name, out, is_total in zip(request.results, outputs, is_sum, strict=True)
    )
