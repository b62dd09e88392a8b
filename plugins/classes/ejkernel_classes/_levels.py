"""Mapped axes: what ``jax.vmap`` and ``jax.grad`` around it make of one call of a kernel object."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from ejkernel_core._operation import Arguments, Restore


def fold_backward(arguments: Mapping[str, Any], names: frozenset[str], size: int) -> tuple[Arguments, Restore]:
    """One more level of ``outer``, as of ``mapped``: the gradients have its axis too."""
    return {**arguments, "outer": (tuple(sorted(names)), *arguments["outer"])}, as_they_are


def as_they_are(results: tuple[Any, ...]) -> tuple[Any, ...]:
    return results


#: Of each mapped axis, the names of the arrays that have it.
Levels = Sequence[Sequence[str]]


def element(arguments: Mapping[str, Any], levels: Levels, name: str) -> jax.ShapeDtypeStruct:
    """An array without these mapped axes, and sharded as it is where that is a part of its type (explicit axes)."""
    array, axes = arguments[name], sum(name in level for level in levels)
    sharding = getattr(array, "sharding", None)
    explicit = not axes and isinstance(sharding, NamedSharding) and any(spec is not None for spec in sharding.spec)
    return jax.ShapeDtypeStruct(array.shape[axes:], array.dtype, sharding=sharding if explicit else None)


def whole(arguments: Mapping[str, Any], levels: Levels, element: Any) -> jax.ShapeDtypeStruct:
    """A result for each element: with every mapped axis."""
    sizes = []
    for i, level in enumerate(levels):
        mapped = level[0]
        sizes.append(arguments[mapped].shape[sum(mapped in outer for outer in levels[:i])])
    sharding = None if sizes else getattr(element, "sharding", None)
    return jax.ShapeDtypeStruct((*sizes, *element.shape), element.dtype, sharding=sharding)


def gradient_types(arguments: Mapping[str, Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Each is like its array, and has every axis that the backward itself is mapped over."""
    outer = arguments["outer"]
    return tuple(whole(arguments, outer, element(arguments, outer, name)) for name in arguments["wrt"])


Once = Callable[[Mapping[str, Any]], list[Any]]
#: A mapped axis: the names of what has it, and those of the results to be summed over it where they do not have it.
Level = tuple[frozenset[str], Sequence[str] | None]


def mapped_over(once: Once, levels: Sequence[Level], given: Mapping[str, Any], loops: str = "") -> list[Any]:
    """``once`` of these arrays, over the mapped axes: all elements at a time.

    ``loops`` is the name of what may know no batching, as a launch of Triton does not unless it is inside a
    ``jax.custom_batching.custom_vmap``: then the elements come one after another, and a warning says so.
    """
    function = once
    for names, summed in reversed(levels):
        function = _one_level(function, names, summed, loops)
    return function(given)


def _one_level(function: Once, names: frozenset[str], summed: Sequence[str] | None, loops: str) -> Once:
    def run(given: Mapping[str, Any]) -> list[Any]:
        moving = {name: value for name, value in given.items() if name in names}
        fixed = {name: value for name, value in given.items() if name not in names}

        def inner(values: Mapping[str, Any]) -> list[Any]:
            return function({**fixed, **values})

        over = jax.lax.map if loops and not _can_be_batched(inner, moving, loops) else _at_a_time
        results: list[Any] = over(inner, moving)
        if summed is None:
            return results
        return [r if name in names else r.sum(0) for name, r in zip(summed, results, strict=True)]

    return run


def _at_a_time(function: Once, moving: Mapping[str, Any]) -> list[Any]:
    results: list[Any] = jax.vmap(function)(moving)
    return results


def _can_be_batched(function: Once, moving: Mapping[str, Any], name: str) -> bool:
    """Asked of shapes, apart from what is being traced: an attempt that fails must leave nothing there."""
    try:
        jax.eval_shape(jax.vmap(function), moving)
    except NotImplementedError as fault:  # of JAX or jax-triton: a primitive without a rule for batching
        count = next(iter(moving.values())).shape[0]
        reason = str(fault).rstrip(".")
        warnings.warn(
            f"{name} runs {count} times, in a loop, for a mapped axis of {count}: {reason}. One launch for all "
            "elements takes a jax.custom_batching.custom_vmap around the launch",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
