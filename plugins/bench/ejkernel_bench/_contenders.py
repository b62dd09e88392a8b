"""Several ways of computing the same attention, checked and then timed side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import attrs
import jax

from ejkernel_tuning import find_labels_in_lowered

from ._errors import error, faults
from ._problem import GRADIENTS, Attention, with_gradients
from ._timing import Times, interleaved

PASSES = ("forward", "forward+backward")

Results = tuple[Any, ...]


@attrs.frozen(eq=False)
class Pass:
    """A function under ``jit``, and what it is called with; it is compiled when it first runs, or before."""

    function: Any
    arguments: tuple[Any, ...]

    def __call__(self) -> Results:
        results: Results = self.function(*self.arguments)
        return results

    def compile(self) -> None:
        """Now, in whatever thread: JAX finds it when it is called."""
        self.function.lower(*self.arguments).compile()

    def kernels(self) -> str:
        """Those of ours that it calls, as its own text tells."""
        labels = find_labels_in_lowered(self.function.lower(*self.arguments))
        return " and ".join(sorted({f"{one.name}.{one.backend}" for one in labels if one.backend is not None}))


def compiled(
    attention: Attention, name: str, arrays: tuple[jax.Array, ...], extras: Mapping[str, jax.Array] | None = None
) -> Pass:
    """One pass of an attention over (query, key, value, d_out)."""
    given = dict(extras or {})  # arguments as well: a bias would be a constant of gigabytes
    if name == "forward":
        return Pass(jax.jit(lambda given, *qkv: (attention(*qkv, **given),)), (given, *arrays[:3]))
    both = jax.jit(lambda given, *arrays: with_gradients(partial(attention, **given))(*arrays))
    return Pass(both, (given, *arrays))


def timed(runs: Mapping[str, Callable[[], Results]], rounds: int) -> dict[str, Times]:
    """Already run once each, by the check."""
    return interleaved(runs, rounds, warm_up=0)


def disagreement(where: str, given: Results, right: Results, tolerance: float) -> Iterator[str]:
    """What is wrong with (out, d_query, ...), as far as both have it."""
    names = ("out", *GRADIENTS)
    errors = {f"{where}: {name}": error(a, b) for name, a, b in zip(names, given, right, strict=False)}
    return faults(errors, tolerance)
