"""Mapped axes: how one call of a kernel object carries the axes of ``jax.vmap``, and of ``jax.grad`` around it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding


def fold_backward(
    arguments: Mapping[str, Any], names: frozenset[str], size: int, sums: frozenset[str]
) -> tuple[dict[str, Any], Callable[[tuple[Any, ...]], Any]]:
    """Add a level to ``mapped`` where gradients are sums over it, else to ``outer``: all gradients have its axis."""
    levels = "mapped" if sums else "outer"
    return {**arguments, levels: (tuple(sorted(names)), *arguments[levels])}, identity


def identity(results: tuple[Any, ...]) -> tuple[Any, ...]:
    return results


#: For each mapped axis, the names of the arrays that have it.
Levels = Sequence[Sequence[str]]


def element_type(arguments: Mapping[str, Any], levels: Levels, name: str) -> jax.ShapeDtypeStruct:
    """The type of an array without its mapped axes, with its sharding if that is a part of the type (explicit axes)."""
    array, axes = arguments[name], sum(name in level for level in levels)
    sharding = getattr(array, "sharding", None)
    is_explicit = not axes and isinstance(sharding, NamedSharding) and any(spec is not None for spec in sharding.spec)
    return jax.ShapeDtypeStruct(array.shape[axes:], array.dtype, sharding=sharding if is_explicit else None)


def batched_type(arguments: Mapping[str, Any], levels: Levels, element: Any) -> jax.ShapeDtypeStruct:
    """The type of a result with all mapped axes."""
    sizes = []
    for i, level in enumerate(levels):
        mapped = level[0]
        sizes.append(arguments[mapped].shape[sum(mapped in outer for outer in levels[:i])])
    sharding = None if sizes else getattr(element, "sharding", None)
    return jax.ShapeDtypeStruct((*sizes, *element.shape), element.dtype, sharding=sharding)


def gradient_types(arguments: Mapping[str, Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The type of each gradient: that of its array, with the axes that the backward itself is mapped over."""
    outer = arguments["outer"]
    return tuple(batched_type(arguments, outer, element_type(arguments, outer, name)) for name in arguments["wrt"])


ElementFunction = Callable[[Mapping[str, Any]], list[Any]]
#: A mapped axis: the names of the arrays that have it; and the names of the results, which are summed over it if their
#: arrays do not have it. None if nothing is summed.
Level = tuple[frozenset[str], Sequence[str] | None]


def map_over_levels(
    run_element: ElementFunction, levels: Sequence[Level], arrays: Mapping[str, Any], loop_name: str = ""
) -> list[Any]:
    """Run a function over all mapped axes of the arrays at once.

    ``loop_name`` is the name of a function that may not support batching, such as a launch of Triton outside of a
    ``jax.custom_batching.custom_vmap``. Its elements then run in a loop, and a warning says so.
    """
    function = run_element
    for names, sums in reversed(levels):
        function = _map_over_level(function, names, sums, loop_name)
    return function(arrays)


def _map_over_level(
    function: ElementFunction, names: frozenset[str], sums: Sequence[str] | None, loop_name: str
) -> ElementFunction:
    def run(arrays: Mapping[str, Any]) -> list[Any]:
        mapped = {name: value for name, value in arrays.items() if name in names}
        unmapped = {name: value for name, value in arrays.items() if name not in names}

        def run_element(values: Mapping[str, Any]) -> list[Any]:
            return function({**unmapped, **values})

        map_elements = jax.lax.map if loop_name and not _can_be_batched(run_element, mapped, loop_name) else _vmap
        results: list[Any] = map_elements(run_element, mapped)
        if sums is None:
            return results
        return [r if name in names else r.sum(0) for name, r in zip(sums, results, strict=True)]

    return run


def _vmap(function: ElementFunction, mapped: Mapping[str, Any]) -> list[Any]:
    results: list[Any] = jax.vmap(function)(mapped)
    return results


def _can_be_batched(function: ElementFunction, mapped: Mapping[str, Any], name: str) -> bool:
    """Whether ``jax.vmap`` supports the function. This is tried with shapes, so that a failure leaves no trace."""
    try:
        jax.eval_shape(jax.vmap(function), mapped)
    except NotImplementedError as fault:  # a primitive of JAX or jax-triton has no batching rule
        count = next(iter(mapped.values())).shape[0]
        reason = str(fault).rstrip(".")
        warnings.warn(
            f"{name} runs {count} times, in a loop, for a mapped axis of {count}: {reason}. One launch for all "
            "elements takes a jax.custom_batching.custom_vmap around the launch",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
