"""From a call as it is written to its results.

The first call of a kind (these options, these arrays given) makes a jitted function; every later one is a dictionary
lookup and a call of that function, whose own cache takes care of shapes, devices and scopes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from . import _gradients
from ._devices import Target, current_platform, target
from ._errors import NoKernel, NotDifferentiable, PluginError
from ._operation import Operation, Restore
from ._plan import Explanation, Plan
from ._primitive import outputs
from ._request import Request, request

if TYPE_CHECKING:
    from ._registry import Registry


@attrs.frozen(eq=False)
class Layout:
    """One way of writing a call of an operation: which of its values are arrays and which are options."""

    operation: Operation
    array_names: tuple[str, ...]
    array_places: tuple[int, ...]
    option_names: tuple[str, ...]
    option_places: tuple[int, ...]
    compiled: dict[Any, Callable[..., Any]] = attrs.field(factory=dict, repr=False)


def call(registry: Registry, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """See ``ejkernel_core.call``. This is the path of every eager call: each line costs its users time."""
    backend, cfg = kwargs.pop("backend", None), kwargs.pop("cfg", None)
    written = (name, len(args), *kwargs)
    layout = registry.calls.get(written) or _layout(registry, written, args, kwargs)
    values = (*args, *kwargs.values())
    arrays = [values[place] for place in layout.array_places]
    options = [values[place] for place in layout.option_places]
    key = (*options, *map(type, options), backend, cfg)  # the types too: True equals 1
    try:
        compiled = layout.compiled.get(key)
    except TypeError:
        raise _unhashable(layout, options, cfg) from None
    if compiled is None:
        compiled = layout.compiled[key] = _compile(registry, layout, options, backend, cfg)
    try:
        return compiled(*arrays)
    except TypeError as error:
        raise _named(layout, arrays, error) from error


def plan(registry: Registry, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """The plan of that call."""
    asked, avals, where, _ = _abstract(registry, name, args, kwargs)
    return asked.plan(avals, where)


def explain(registry: Registry, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
    """The plan of that call and of its gradients."""
    asked, avals, where, restore = _abstract(registry, name, args, kwargs)
    explanation = _explain(asked, avals, where)
    if explanation.plan is None or asked.operation.backward is None:
        return explanation
    results = outputs(asked, avals)
    cotangents = [result if used else None for result, used in zip(results, _used(restore, results), strict=True)]
    backward, values = _gradients.backward_request(asked, avals, results, cotangents, _floating(asked, avals))
    return attrs.evolve(explanation, backward=_explain(backward, values, where))


def _layout(registry: Registry, written: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layout:
    operation = registry.operation(written[0])
    places = operation.bind(tuple(range(len(args))), {name: len(args) + i for i, name in enumerate(kwargs)})
    arrays = {name: place for name, place in places.items() if name in operation.arrays}
    options = {name: place for name, place in places.items() if name not in operation.arrays}
    layout = Layout(operation, tuple(arrays), tuple(arrays.values()), tuple(options), tuple(options.values()))
    registry.calls[written] = layout
    return layout


def _compile(
    registry: Registry, layout: Layout, options: Sequence[Any], backend: str | None, cfg: Any
) -> Callable[..., Any]:
    for name, value in zip(layout.option_names, options, strict=True):
        if isinstance(value, (jax.Array, np.ndarray)):
            raise _not_static(layout.operation, name, value)
    if backend is not None:
        registry.kernel(layout.operation.name, backend)  # unknown or broken: said now, by name

    def run(*arrays: Any) -> Any:
        asked, values, restore = _prepared(registry, layout, arrays, options, backend, cfg)
        return restore(_gradients.apply(asked, values))

    run.__name__ = run.__qualname__ = layout.operation.name  # what the HLO calls it
    return jax.jit(run)


def _prepared(
    registry: Registry, layout: Layout, arrays: Sequence[Any], options: Sequence[Any], backend: str | None, cfg: Any
) -> tuple[Request, list[Any], Restore]:
    operation = layout.operation
    given = dict(zip((*layout.array_names, *layout.option_names), (*arrays, *options), strict=True))
    _check_arrays(layout, arrays)
    arguments, restore = operation.prepare(operation.complete(given))
    return *request(registry, operation, arguments, backend, cfg), restore


def _abstract(
    registry: Registry, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Request, list[Any], Target, Restore]:
    """The request of a call, the shapes of its arrays, where it runs, and how its results are given back."""
    backend, cfg = kwargs.pop("backend", None), kwargs.pop("cfg", None)
    written = (name, len(args), *kwargs)
    layout = registry.calls.get(written) or _layout(registry, written, args, kwargs)
    if backend is not None:
        registry.kernel(name, backend)
    values = (*args, *kwargs.values())
    arrays = [values[place] for place in layout.array_places]
    options = [values[place] for place in layout.option_places]
    seen: list[tuple[Request, Restore]] = []

    def trace(*arrays: Any) -> list[Any]:
        asked, values, restore = _prepared(registry, layout, arrays, options, backend, cfg)
        seen.append((asked, restore))
        return values

    avals = jax.eval_shape(trace, *arrays)
    asked, restore = seen[0]
    return asked, avals, target(current_platform(arrays)), restore


def _explain(asked: Request, avals: Sequence[Any], where: Target) -> Explanation:
    try:
        return Explanation(asked.operation.name, asked.plan(avals, where), None)
    except (NoKernel, PluginError) as error:
        return Explanation(asked.operation.name, None, str(error))


def _used(restore: Restore, results: Sequence[Any]) -> list[bool]:
    """Which results the caller gets anything of: the others have no cotangent."""
    jaxpr = jax.make_jaxpr(restore)(tuple(results)).jaxpr
    read = {id(variable) for eqn in jaxpr.eqns for variable in eqn.invars} | {id(v) for v in jaxpr.outvars}
    return [id(variable) in read for variable in jaxpr.invars]


def _floating(asked: Request, avals: Sequence[Any]) -> tuple[str, ...]:
    """The arrays that a gradient may be asked for."""
    floating = (n for n, aval in zip(asked.arrays, avals, strict=True) if jnp.issubdtype(aval.dtype, jnp.inexact))
    return tuple(name for name in floating if name in asked.operation.differentiable)


# -- what to say when a value is not what it should be ------------------------------------------------------------


def _check_arrays(layout: Layout, arrays: Sequence[Any]) -> None:
    for name, value in zip(layout.array_names, arrays, strict=True):
        if value is not None and not (hasattr(value, "shape") and hasattr(value, "dtype")):
            raise TypeError(
                f"{layout.operation.name}: {name} takes an array; got {type(value).__name__} {_brief(value)}"
            )


def _named(layout: Layout, arrays: Sequence[Any], error: TypeError) -> TypeError:
    """The error that JAX raised, or ours where we can say more."""
    if "forward-mode" in str(error) and not isinstance(error, NotDifferentiable):
        return NotDifferentiable(
            f"{layout.operation.name}: forward-mode differentiation (jvp, jacfwd, hessian) goes through the reference "
            "alone: pass backend='reference'"
        )
    try:
        jax.eval_shape(lambda *given: _check_arrays(layout, given), *arrays)
    except TypeError:
        _check_arrays(layout, [np.asarray(a) if isinstance(a, (bool, int, float, complex)) else a for a in arrays])
    return error


def _not_static(operation: Operation, name: str, value: Any) -> TypeError:
    traced = "a traced" if isinstance(value, jax.core.Tracer) else "an"
    return TypeError(
        f"{operation.name}: {name} is a static option and takes a plain Python value, known while tracing; "
        f"got {traced} array of shape {value.shape}"
    )


def _unhashable(layout: Layout, options: Sequence[Any], cfg: Any) -> TypeError:
    for name, value in zip((*layout.option_names, "cfg"), (*options, cfg), strict=True):
        if isinstance(value, (jax.Array, np.ndarray)):
            return _not_static(layout.operation, name, value)
        try:
            hash(value)
        except TypeError:
            return TypeError(
                f"{layout.operation.name}: {name} is a static option and has to be hashable; "
                f"got {type(value).__name__} {_brief(value)}" + (" (give a tuple)" if isinstance(value, list) else "")
            )
    return TypeError(f"{layout.operation.name}: an option is not hashable")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
