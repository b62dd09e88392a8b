"""The call of an example, by the core or by a peer: its arrays, its passes, and whether their results are right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

import ejkernel_core
from ejkernel_core import Example, Plan, Registry
from ejkernel_tuning import find_labels_in_lowered

from ._errors import TOLERANCE, error, fault_messages

PASSES = ("forward", "forward+backward")

#: Of the arrays of a call, by name.
Function = Callable[..., Any]
Results = tuple[Any, ...]
#: What is timed.
Run = Callable[[], Results]


# -- the arguments ----------------------------------------------------------------------------------------------------


def benchmark_examples(operation: str, registry: Registry = ejkernel_core.registry) -> list[Example]:
    """The examples that are measured and recorded."""
    examples = registry.operation(operation).examples
    return [example for example in (examples() if examples else ()) if "benchmark" in example.uses]


@cache
def describe(example: Example) -> dict[str, Any]:
    """The arguments of an example: what JAX draws as shapes and dtypes, NumPy's arrays and all else as they are."""
    values: dict[str, Any] = {}

    def draw() -> dict[str, Any]:
        values.update((name, example.rounded(value)) for name, value in example.arguments(0).items())
        return {name: value for name, value in values.items() if isinstance(value, jax.Array)}

    shapes: dict[str, Any] = jax.eval_shape(draw)
    return values | shapes


def options_of(example: Example) -> dict[str, Any]:
    """The arguments that are not arrays."""
    return {name: value for name, value in describe(example).items() if not _is_array(value)}


def shapes_of(example: Example) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays by name, as shapes and dtypes."""
    arrays = {name: value for name, value in describe(example).items() if _is_array(value)}
    return {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


@attrs.frozen(eq=False)
class Inputs:
    """The arrays of a call, and a cotangent of each result that is differentiated."""

    arrays: Mapping[str, Any]
    #: The arrays whose gradients are computed.
    wrt: tuple[str, ...]
    cotangents: tuple[Any, ...]
    #: The names of the results, in order; and of those that have cotangents.
    results: tuple[str, ...]
    differentiated: tuple[str, ...]

    #: Whether a result has 8 bits.
    is_quantized: bool = False
    #: By the name of an array that the call updates in place: the place of the result that it becomes.
    updated: Mapping[str, int] = attrs.field(factory=dict)

    def names(self, pass_name: str) -> tuple[str, ...]:
        """The names of what a pass computes."""
        return self.results if pass_name == PASSES[0] else (*self.differentiated, *(f"d_{name}" for name in self.wrt))

    @property
    def parts(self) -> tuple[dict[str, Any], tuple[Any, ...], tuple[Any, ...]]:
        """The other arrays, the arrays of ``wrt``, and the cotangents."""
        others = {name: array for name, array in self.arrays.items() if name not in self.wrt}
        return others, tuple(self.arrays[name] for name in self.wrt), self.cotangents

    def of_pass(self, pass_name: str) -> tuple[Any, ...]:
        """The arguments of a pass."""
        if pass_name != PASSES[0]:
            return self.parts
        others = {name: array for name, array in self.arrays.items() if name not in self.updated}
        return others, {name: self.arrays[name] for name in self.updated}

    def astype(self, dtype: str) -> Inputs:
        """The same numbers in another dtype. Those of 8 bits stay, because what they stand for may have a scale."""

        def converted(array: Any) -> Any:
            if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize == 1:
                return array
            return array.update(dtype=dtype) if isinstance(array, jax.ShapeDtypeStruct) else array.astype(dtype)

        arrays = {name: converted(array) for name, array in self.arrays.items()}
        return attrs.evolve(self, arrays=arrays, cotangents=tuple(map(converted, self.cotangents)))


def draw(example: Example, registry: Registry = ejkernel_core.registry) -> Inputs:
    """The same numbers every time."""
    arguments = {name: example.rounded(value) for name, value in example.arguments(0).items()}
    arrays = {name: jnp.asarray(value) for name, value in arguments.items() if _is_array(value)}
    cotangents = _cotangents(example, registry) if example.wrt else ()
    return attrs.evolve(abstract_inputs(example, registry), arrays=arrays, cotangents=cotangents)


def abstract_inputs(example: Example, registry: Registry = ejkernel_core.registry) -> Inputs:
    """The inputs with shapes and dtypes in place of arrays."""
    results = _result_shapes(example, registry)
    declared = registry.operation(example.op).results
    names = declared[: len(results)] if len(results) <= len(declared) else tuple(map(str, range(len(results))))
    floating_shapes = {name: shape for name, shape in zip(names, results, strict=True) if _is_floating(shape)}
    is_quantized = any(shape.dtype.itemsize == 1 and shape.dtype != bool for shape in results)
    cotangents, differentiated = tuple(floating_shapes.values()), tuple(floating_shapes)
    arrays, aliases = shapes_of(example), registry.operation(example.op).aliases
    updated = {array: declared.index(result) for result, array in aliases.items() if array in arrays}
    return Inputs(arrays, example.wrt, cotangents, names, differentiated, is_quantized, updated)


def _result_shapes(example: Example, registry: Registry) -> list[Any]:
    return jax.tree.leaves(
        jax.eval_shape(lambda arrays: by_core(example, None, registry)(**arrays), shapes_of(example))
    )


def _cotangents(example: Example, registry: Registry) -> tuple[jax.Array, ...]:
    shapes = [shape for shape in _result_shapes(example, registry) if _is_floating(shape)]
    key = jax.random.split(jax.random.key(0), 4)[3]  # examples draw their arrays from the ones before
    keys = [key, *jax.random.split(key, len(shapes))]
    return tuple(
        jax.random.normal(key, shape.shape, jnp.float32).astype(shape.dtype)
        for key, shape in zip(keys, shapes, strict=False)
    )


def _is_floating(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


# -- functions and passes ---------------------------------------------------------------------------------------------


def by_core(example: Example, backend: str | None = None, registry: Registry = ejkernel_core.registry) -> Function:
    """The call through the core, by the kernel that it chooses or by this backend."""
    options = options_of(example)

    def call(**arrays: Any) -> Any:
        return registry.call(example.op, **arrays, **options, backend=backend)

    return call


def with_gradients(function: Function, wrt: Sequence[str]) -> Callable[..., Results]:
    """From (the other arrays by name, the arrays of ``wrt``, cotangents) to the results and the gradients."""

    def forward_and_backward(others: Mapping[str, Any], arrays: Sequence[Any], cotangents: Sequence[Any]) -> Results:
        def results(*arrays: Any) -> Results:
            leaves = jax.tree.leaves(function(**others, **dict(zip(wrt, arrays, strict=True))))
            return tuple(filter(_is_floating, leaves))

        out, pull_back = jax.vjp(results, *arrays)
        return (*out, *pull_back(tuple(cotangents)))

    return forward_and_backward


@attrs.frozen(eq=False)
class Pass:
    """A function under ``jit``, and its arguments. It is compiled by ``compile`` or the first run.

    A run that updates arrays takes them away from the run before, so that no copy is timed: results have to be read
    before the next run. The first one updates a copy of the arguments.
    """

    function: Any
    arguments: tuple[Any, ...]
    #: As that of ``Inputs``. The last argument has these arrays.
    updated: Mapping[str, int] = attrs.field(factory=dict)
    _next: dict[str, Any] = attrs.field(factory=dict, init=False)

    def __call__(self) -> Results:
        if not self.updated:
            results: Results = self.function(*self.arguments)
            return results
        others, arrays = self.arguments
        results = self.function(others, dict(self._next) or jax.tree.map(jnp.copy, arrays))
        self._next.update({name: results[place] for name, place in self.updated.items()})
        return results

    def compile(self) -> Any:
        """In any thread: JAX finds the compiled function when it is called."""
        return self.function.lower(*self.arguments).compile()

    def kernels(self) -> str:
        """The names of our kernels in it, from the labels in its text."""
        labels = find_labels_in_lowered(self.function.lower(*self.arguments))
        return " and ".join(sorted({f"{label.name}.{label.backend}" for label in labels if label.backend is not None}))


def jitted(function: Function, pass_name: str, inputs: Inputs) -> Pass:
    """One pass of a function. All arrays are arguments, because a constant bias would have gigabytes."""
    if pass_name != PASSES[0]:
        return Pass(jax.jit(with_gradients(function, inputs.wrt)), inputs.of_pass(pass_name))
    program = lambda others, updated: tuple(jax.tree.leaves(function(**others, **updated)))
    return Pass(jax.jit(program, donate_argnums=1), inputs.of_pass(pass_name), inputs.updated)


def plans(example: Example, backend: str | None, registry: Registry = ejkernel_core.registry) -> list[Plan]:
    """The plans of the core for the example: forward and, if a kernel has it, backward."""
    explanation = registry.explain(example.op, **shapes_of(example), **options_of(example), backend=backend)
    forward_and_backward = (explanation.plan, explanation.backward and explanation.backward.plan)
    return [plan for plan in forward_and_backward if plan]


# -- results ----------------------------------------------------------------------------------------------------------


def mismatches(
    label: str, results: Iterable[Any], expected: Iterable[Any], names: Sequence[str], tolerance: float
) -> Iterator[str]:
    """A sentence for each result that is out of tolerance."""
    pairs = zip(names, results, expected, strict=False)
    return fault_messages({f"{label}: {name}": error(result, right) for name, result, right in pairs}, tolerance)


def correct_runs(
    runs: Mapping[str, Run],
    label: str,
    expected: Results,
    names: Sequence[str],
    tolerance: float,
    tolerances: Mapping[str, float] = MappingProxyType({}),
) -> tuple[dict[str, Run], list[str]]:
    """The runs with right results, and what is wrong with the others. Each runs once. Some have their own tolerance."""

    def wrong(contender: str, results: Results) -> Iterator[str]:
        allowed = tolerances.get(contender, tolerance)
        return mismatches(f"{contender}, {label}", results, expected, names, allowed)

    return checked_runs(runs, label, wrong)


def checked_runs(
    runs: Mapping[str, Run], label: str, wrong: Callable[[str, Results], Iterable[str]]
) -> tuple[dict[str, Run], list[str]]:
    """The same where ``wrong`` returns a sentence for all that is wrong with the results of a contender."""
    correct_ones, messages = {}, []
    for contender, run in runs.items():
        try:
            results = jax.block_until_ready(run())
        except Exception as fault:  # any fault is reported, and the other contenders are measured
            messages.append(f"{contender}, {label}: {describe_fault(fault)}")
            continue
        new_messages = list(wrong(contender, results))
        del results  # it can be large, and the next contender has results of its own
        messages += new_messages
        if not new_messages:
            correct_ones[contender] = run
    return correct_ones, messages


def describe_fault(fault: Exception) -> str:
    """An exception in a line."""
    return f"{type(fault).__name__}: {str(fault)[:200]}"


def tolerance_of(example: Example) -> float:
    """The relative error that is allowed."""
    return TOLERANCE[example.dtype]
