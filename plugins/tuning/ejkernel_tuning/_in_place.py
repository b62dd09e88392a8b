"""Timing of kernels that update an argument: each call gets what the one before returned, so that no copy is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_core import Operation


def compile_in_place(operation: Operation | None, function: Callable[..., Any], avals: Mapping[str, Any]) -> Any:
    """The compiled function of these arrays, which by name are those of the operation. It may be given those that the
    operation updates: see ``InPlace``.
    """
    names, aliases = list(avals), {} if operation is None else operation.aliases
    places = {
        names.index(array): operation.results.index(result)
        for result, array in aliases.items()
        if operation is not None and array in names
    }
    compiled = jax.jit(function, donate_argnums=tuple(places)).lower(*avals.values()).compile()
    return InPlace(compiled, places) if places else compiled


@attrs.define(eq=False)
class InPlace:
    """A compiled function that takes some of its arguments away."""

    compiled: Any
    #: By the index of such an argument: that of the result which it becomes.
    places: Mapping[int, int]
    #: What the next call gets in their places.
    _next: dict[int, Any] | None = None

    def memory_analysis(self) -> Any:
        return self.compiled.memory_analysis()

    def __call__(self, *arrays: Any) -> Any:
        """The results for these arrays, which stay; or, after ``begin``, for the results of the call before."""
        if self._next is None:
            return self.compiled(*self._with(self._copies(arrays), arrays))
        results = self.compiled(*self._with(self._next, arrays))
        self._next = {index: results[place] for index, place in self.places.items()}
        return results

    def begin(self, arrays: Sequence[Any]) -> None:
        """Have the next calls update a copy of these arrays."""
        self._next = jax.block_until_ready(self._copies(arrays))

    def end(self) -> None:
        self._next = None

    def _copies(self, arrays: Sequence[Any]) -> dict[int, Any]:
        return {index: jnp.copy(arrays[index]) for index in self.places}

    @staticmethod
    def _with(others: Mapping[int, Any], arrays: Sequence[Any]) -> list[Any]:
        return [others.get(index, array) for index, array in enumerate(arrays)]
