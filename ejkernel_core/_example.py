"""One concrete call of an operation, which tests, benchmarks, compilers and tuned records use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import jax
import numpy as np


@attrs.frozen(eq=False)
class Example:
    """A call of an operation, and its uses.

    >>> ones = Example("ones", "double", lambda draw: {"x": np.ones((2, 3)), "twice": True}, dtype="bfloat16")
    >>> ones.abstract()
    {'x': ShapeDtypeStruct(shape=(2, 3), dtype=bfloat16), 'twice': True}
    """

    #: Readable, and unique among the operation's examples.
    name: str
    op: str
    #: ``arguments(draw)``: the arguments of the call by name, as a user writes them. Every draw has the same shapes and
    #: options, and other numbers. NumPy arrays of float64 are rounded to ``dtype``; everything else is passed as it is.
    #: Large examples draw with ``jax.random``, so that their shapes are known without their numbers.
    arguments: Callable[[int], Mapping[str, Any]] = attrs.field(repr=False)
    dtype: str = "float32"
    #: The arrays whose gradients are compared.
    wrt: tuple[str, ...] = ()
    #: The sets of these arrays in which the calls of a program are differentiated, for the check "programs". By
    #: default each array alone, all, and all but one.
    wrt_sets: tuple[tuple[str, ...], ...] = ()
    #: Words by which a kernel declares what it refuses: "bias", "float16", "head_dim=80".
    features: frozenset[str] = frozenset()
    #: What kernels are checked for: "values" (with gradients, rows, refusals and the configuration space),
    #: "accumulation", "configurations" (all of that space are run), "sensitivity", "programs", and the names of
    #: ``ejkernel_testing.TRANSFORMS``.
    checks: frozenset[str] = frozenset({"values"})
    #: The same call with one argument given, taken away or changed, for the check "sensitivity".
    variations: tuple[Example, ...] = ()
    #: The arrays whose first axis is the batch, which "shard_map" shards over 8 devices. By default from the axes.
    batched: tuple[str, ...] = ()
    #: Whether only the long sweep has it.
    long: bool = False
    #: Other uses, by name: "benchmark" (measured, and recorded by the packages of tuned
    #: records), "resources" (compiled for GPUs), "vmem" and "estimate" (compiled for TPUs).
    uses: frozenset[str] = frozenset()

    def abstract(self) -> dict[str, Any]:
        """The arguments, with the shape and dtype of each array in its place."""
        options: dict[str, Any] = {}

        def arrays() -> dict[str, Any]:
            arguments = {name: self.rounded(value) for name, value in self.arguments(0).items()}
            options.update((name, value) for name, value in arguments.items() if not _is_array(value))
            return {name: value for name, value in arguments.items() if _is_array(value)}

        shapes = jax.eval_shape(arrays)
        return {name: shapes.get(name, options.get(name)) for name in (*shapes, *options)}

    def rounded(self, value: Any) -> Any:
        """An argument as the call takes it: arrays of float64 in the example's dtype."""
        if isinstance(value, np.ndarray) and value.dtype == np.float64:
            return value.astype(jax.numpy.dtype(self.dtype))
        return value


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray)
