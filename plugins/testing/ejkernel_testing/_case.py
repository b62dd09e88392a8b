"""One call that kernels are proved on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs


@attrs.frozen(eq=False)
class Case:
    """A call of an operation, with what is worth knowing about it."""

    #: Readable and unique among the operation's cases.
    name: str
    op: str
    #: ``arguments(draw)``: the call's arguments by name, as a user writes them. Every draw has the same shapes and
    #: options, and other numbers. NumPy arrays of float64 are rounded to ``dtype``; all else is passed as it is.
    arguments: Callable[[int], Mapping[str, Any]] = attrs.field(repr=False)
    dtype: str = "float32"
    #: The arrays whose gradients are proved.
    wrt: tuple[str, ...] = ()
    #: The sets of these that the calls of a program are differentiated in, for "programs": by default each array alone,
    #: all, and all but one.
    wrt_sets: tuple[tuple[str, ...], ...] = ()
    #: Words by which a backend can say what it refuses: "bias", "float16", "head_dim=80".
    features: frozenset[str] = frozenset()
    #: What is proved: "values" (with gradients, rows, refusals and the space of configurations), "accumulation",
    #: "sensitivity", "programs", names of TRANSFORMS.
    checks: frozenset[str] = frozenset({"values"})
    #: The same call with one argument given, taken away or changed, for "sensitivity".
    variations: tuple[Case, ...] = ()
    #: The arrays with the batch as their first axis, as all results then have: "shard_map" cuts them, at 8. Where the
    #: operation has axes, they tell.
    batched: tuple[str, ...] = ()
    #: Part of the long sweep only.
    long: bool = False
