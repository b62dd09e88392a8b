"""From a call as it is written to its results.

The first call of a kind (these options, these arrays given) makes a jitted function; every later one is a dictionary
lookup and a call of that function, whose own cache takes care of shapes, devices and scopes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from . import _gradients, _scopes
from ._choice import with_space_faults
from ._devices import Target, current_platform, target
from ._errors import NoConfig, NoKernel, PluginError, Unsupported
from ._kernel import Invocation
from ._keys import content, sharding_fingerprint
from ._operation import Operation, Restore
from ._plan import Explanation, Plan
from ._plugins import Plugins
from ._primitive import outputs
from ._request import Kinds, Request, Terms, request
from ._validation import check_values

#: How many compiled functions are kept for one way of writing a call: one for each set of options, the oldest go first.
KEPT = 512


class Registry(Plugins):
    """Operations, kernels and policies, and the calls made with them.

    A new registry knows what is installed (``plugins`` as in EJKERNEL_PLUGINS chooses among it) and what is registered
    with it afterwards. One that takes the ``policies_of`` another, and what that one remembers, starts with these.
    """

    def call(self, op: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run an operation by the best kernel there is; see ``ejkernel_core.call``."""
        return call(self, op, args, kwargs)

    def plan(self, op: str, /, *args: Any, **kwargs: Any) -> Plan:
        """The plan of that call; arrays may be abstract. Raises what the call would raise."""
        return plan(self, op, args, kwargs)

    def invocation(self, op: str, /, *args: Any, **kwargs: Any) -> Invocation:
        """The abstract invocation of that call; its ``key`` is what configurations are remembered by."""
        return invocation(self, op, args, kwargs)

    def explain(self, op: str, /, *args: Any, **kwargs: Any) -> Explanation:
        """The plan of that call and of its gradients, or why there is none."""
        return explain(self, op, args, kwargs)


@attrs.frozen(eq=False)
class Layout:
    """One way of writing a call of an operation: which of its values are arrays and which are options."""

    operation: Operation
    array_names: tuple[str, ...]
    array_places: tuple[int, ...]
    option_names: tuple[str, ...]
    option_places: tuple[int, ...]
    #: By options and terms: what is called, and the kinds of keys that it has chosen by.
    compiled: dict[Any, tuple[Callable[..., Any], Kinds]] = attrs.field(factory=dict, repr=False)

    def forget(self, kind: tuple[str, str]) -> None:
        """Have the calls choose anew that have chosen by keys of this kind."""
        for key in [key for key, (_, kinds) in list(self.compiled.items()) if kind in kinds.seen]:
            self.compiled.pop(key, None)


def call(registry: Plugins, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """See ``ejkernel_core.call``. This is the path of every eager call: each line costs its users time."""
    backend, cfg, validate = kwargs.pop("backend", None), kwargs.pop("cfg", None), kwargs.pop("validate", False)
    layout, arrays, options = _taken_apart(registry, name, args, kwargs)
    scope = _scopes.current()
    cut = _cut(layout, arrays)
    try:
        key = (*options, backend, cfg, content((*options, cfg)), scope.digest, cut)
        compiled = layout.compiled.get(key)
    except TypeError:
        raise _unhashable(layout, options, backend, cfg) from None
    if validate is not False:
        _check_values(registry, layout, arrays, options, validate)
    if compiled is not None:
        return _run(layout, compiled[0], arrays)
    terms, changes = Terms(registry, backend, cfg, scope, cut), registry.changes
    run = _compile(layout, options, terms)
    results = _run(layout, run, arrays)
    if len(layout.compiled) >= KEPT:
        layout.compiled.pop(next(iter(layout.compiled)), None)
    # Only now: a call that was rejected takes no other's place. What may be known better by now is chosen anew.
    if registry.is_unchanged(terms.kinds.seen, changes):
        layout.compiled[key] = run, terms.kinds
    return results


def _taken_apart(
    registry: Plugins, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Layout, list[Any], list[Any]]:
    written = (name, len(args), *kwargs)
    layout = registry.calls.get(written) or _layout(registry, written, args, kwargs)
    values = (*args, *kwargs.values())
    return layout, [values[place] for place in layout.array_places], [values[place] for place in layout.option_places]


def _run(layout: Layout, run: Callable[..., Any], arrays: Sequence[Any]) -> Any:
    try:
        return run(*arrays)
    except (TypeError, ValueError, OverflowError) as error:
        told = _told(layout, arrays, error)
        if told is None:
            raise
        raise told from error
    except _OutOfStep:
        # Another task of this thread entered a scope, and JAX's key tells of that one. Only we look into this function;
        # what is being traced around it would be kept under the wrong key.
        if any(isinstance(array, jax.core.Tracer) for array in arrays):
            raise
        with _scopes.in_step_for_now():
            return run(*arrays)


class _OutOfStep(RuntimeError):
    """JAX's jit key tells of another scope than the one that holds."""


def _cut(layout: Layout, arrays: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """The arrays that are cut over several devices, and how: known here, and not while JAX traces or lowers."""
    if all(map(_is_whole, arrays)):
        return ()
    cuts = (
        (n, sharding_fingerprint(a)) for n, a in zip(layout.array_names, arrays, strict=True) if hasattr(a, "shape")
    )
    return tuple((name, cut) for name, cut in cuts if cut)


def _is_whole(array: Any) -> bool:
    """Whether it is known at once that there is nothing to find out."""
    sharding = getattr(array, "sharding", None)
    if sharding is None:
        return not isinstance(array, jax.core.Tracer)
    return type(sharding) is jax.sharding.SingleDeviceSharding


def invocation(registry: Plugins, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Invocation:
    """The abstract invocation of that call."""
    asked, _, avals, where, _ = asked_for(registry, name, args, kwargs)
    return asked.invocation(avals, where)


def plan(registry: Plugins, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """The plan of that call."""
    asked, _, avals, where, _ = asked_for(registry, name, args, kwargs)
    return asked.plan(avals, where)


def explain(registry: Plugins, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
    """The plan of that call and of its gradients."""
    asked, _, avals, where, restore = asked_for(registry, name, args, kwargs)
    explanation = _explain(asked, avals, where)
    if explanation.plan is None or asked.operation.backward is None:
        return explanation
    results = outputs(asked, avals)
    cotangents = [result if used else None for result, used in zip(results, used(restore, results), strict=True)]
    backward, values = _gradients.backward_request(asked, avals, results, cotangents, floating(asked, avals))
    return attrs.evolve(explanation, backward=_explain(backward, values, where))


def _layout(registry: Plugins, written: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layout:
    calls = registry.calls  # before the operation is read: what is registered meanwhile starts with another one
    operation = registry.operation(written[0])
    places = operation.bind(tuple(range(len(args))), {name: len(args) + i for i, name in enumerate(kwargs)})
    arrays = {name: place for name, place in places.items() if name in operation.arrays}
    options = {name: place for name, place in places.items() if name not in operation.arrays}
    layout = Layout(operation, tuple(arrays), tuple(arrays.values()), tuple(options), tuple(options.values()))
    calls[written] = layout
    return layout


def _compile(layout: Layout, options: Sequence[Any], terms: Terms) -> Callable[..., Any]:
    for name, value in zip(layout.option_names, options, strict=True):
        if isinstance(value, (jax.Array, np.ndarray)):
            raise _not_static(layout.operation, name, value)
    _check_backend(terms.registry, layout.operation.name, terms.backend)

    def run(*arrays: Any) -> Any:
        if not _scopes.in_step():
            raise _OutOfStep(
                f"{layout.operation.name}: another task of this thread is inside overlay_cache or policy_override, or "
                "this thread has its scope from another (asyncio.to_thread). JAX keeps its jit key for a thread, so a "
                "function cannot be traced here: enter the scope in this thread, and leave it without an await between"
            )
        asked, values, restore = _prepared(layout, arrays, options, terms)
        return restore(_gradients.apply(asked, values))

    # What the compiled code, and JAX's own errors, call the function and its arguments.
    run.__name__ = run.__qualname__ = layout.operation.name
    names = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in layout.array_names]
    run.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    return jax.jit(run)


def _check_backend(registry: Plugins, op: str, backend: Any) -> None:
    """An unknown or broken backend is told before anything else is done."""
    if backend is None:
        return
    if not isinstance(backend, str):
        raise TypeError(f"{op}: backend takes a name; got {type(backend).__name__} {_brief(backend)}")
    registry.kernel(op, backend)


def _prepared(
    layout: Layout, arrays: Sequence[Any], options: Sequence[Any], terms: Terms
) -> tuple[Request, list[Any], Restore]:
    operation = layout.operation
    _check_arrays(layout, arrays)
    # Numbers are arrays too; under ``jax.disable_jit`` nobody has made them so.
    arrays = [jnp.asarray(value) if isinstance(value, _NUMBERS) else value for value in arrays]
    given = dict(zip((*layout.array_names, *layout.option_names), (*arrays, *options), strict=True))
    arguments, restore = operation.prepared(operation.complete(given))
    return *request(terms, operation, arguments), restore


def _check_values(
    registry: Plugins, layout: Layout, arrays: Sequence[Any], options: Sequence[Any], validate: Any
) -> None:
    given = dict(zip((*layout.array_names, *layout.option_names), (*arrays, *options), strict=True))

    def trace(*arrays: Any) -> list[Any]:
        return _prepared(layout, arrays, options, Terms(registry))[1]

    shapes = functools.partial(_run, layout, functools.partial(jax.eval_shape, trace), arrays)
    check_values(layout.operation, given, validate, shapes)


def asked_for(
    registry: Plugins, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], concrete: bool = False
) -> tuple[Request, list[Any] | None, list[Any], Target, Restore]:
    """The request of a call, its prepared arrays (``concrete``, and if there are some), their shapes, where it runs,
    and how its results are given back.
    """
    layout, arrays, options, terms = _opened(registry, name, args, kwargs)
    terms = attrs.evolve(terms, scope=attrs.evolve(terms.scope, may_measure=False))
    seen: list[tuple[Request, Restore]] = []

    def trace(*arrays: Any) -> list[Any]:
        asked, values, restore = _prepared(layout, arrays, options, terms)
        seen.append((asked, restore))
        return values

    avals = _run(layout, functools.partial(jax.eval_shape, trace), arrays)
    asked, restore = seen[0]
    values = trace(*arrays) if concrete and not any(map(_is_abstract, arrays)) else None
    return asked, values, avals, target(current_platform(arrays)), restore


def whole(
    registry: Plugins, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], inlined: bool = False
) -> tuple[tuple[Any, ...], Restore]:
    """All results of a call as its kernel gives them, and how the caller gets them; to be traced. They have the
    derivative of a call, or ``inlined`` the one that JAX makes of the kernel.
    """
    layout, arrays, options, terms = _opened(registry, name, args, kwargs)
    asked, values, restore = _prepared(layout, arrays, options, terms)
    return (_gradients.inlined if inlined else _gradients.apply)(asked, values), restore


def _opened(
    registry: Plugins, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Layout, list[Any], list[Any], Terms]:
    if "validate" in kwargs:
        raise TypeError(f"{name}: validate looks at values, and this at shapes alone: give it to call, or leave it out")
    backend, cfg = kwargs.pop("backend", None), kwargs.pop("cfg", None)
    layout, arrays, options = _taken_apart(registry, name, args, kwargs)
    _check_backend(registry, name, backend)
    return layout, arrays, options, Terms(registry, backend, cfg, _scopes.current(), _cut(layout, arrays))


def _is_abstract(array: Any) -> bool:
    return isinstance(array, (jax.core.Tracer, jax.ShapeDtypeStruct))


def _explain(asked: Request, avals: Sequence[Any], where: Target) -> Explanation:
    try:
        kernels, _ = asked.registry.kernels(asked.operation.name)
        return Explanation(asked.operation.name, with_space_faults(asked.plan(avals, where), kernels), None)
    except (NoKernel, NoConfig, PluginError, Unsupported) as error:
        return Explanation(asked.operation.name, None, str(error))


def used(restore: Restore, results: Sequence[Any]) -> list[bool]:
    """Which results the caller gets anything of: the others have no cotangent."""
    jaxpr = jax.make_jaxpr(restore)(tuple(results)).jaxpr
    read = {id(variable) for eqn in jaxpr.eqns for variable in eqn.invars} | {id(v) for v in jaxpr.outvars}
    return [id(variable) in read for variable in jaxpr.invars]


def floating(asked: Request, avals: Sequence[Any]) -> tuple[str, ...]:
    """The arrays that a gradient may be asked for."""
    floating = (n for n, aval in zip(asked.arrays, avals, strict=True) if jnp.issubdtype(aval.dtype, jnp.inexact))
    return tuple(name for name in floating if name in asked.operation.differentiable)


# -- what to say when a value is not what it should be ------------------------------------------------------------


_NUMBERS = (bool, int, float, complex, np.generic)


def _check_arrays(layout: Layout, arrays: Sequence[Any]) -> None:
    parameters = layout.operation.signature.parameters
    for name, value in zip(layout.array_names, arrays, strict=True):
        optional = value is None and parameters[name].default is None
        if not (optional or isinstance(value, _NUMBERS) or (hasattr(value, "shape") and hasattr(value, "dtype"))):
            raise TypeError(
                f"{layout.operation.name}: {name} takes an array; got {type(value).__name__} {_brief(value)}"
            )


def _told(layout: Layout, arrays: Sequence[Any], error: Exception) -> Exception | None:
    """What we can say better than the error that JAX raised."""
    if not isinstance(error, TypeError):
        return _too_large(layout, arrays)
    try:
        _check_arrays(layout, arrays)
    except TypeError as better:
        return better
    return None


def _too_large(layout: Layout, arrays: Sequence[Any]) -> ValueError | None:
    """A plain int takes the dtype that JAX has for ints, whatever the operation would make of it."""
    bits = 8 * jax.dtypes.canonicalize_dtype(int).itemsize
    for name, value in zip(layout.array_names, arrays, strict=True):
        if type(value) is int and not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            return ValueError(
                f"{layout.operation.name}: {name} takes an int from -2**{bits - 1} to 2**{bits - 1} - 1, as JAX does, "
                f"or a number with a dtype, as jnp.uint32 is; got one of {value.bit_length()} bits"
            )
    return None


def _not_static(operation: Operation, name: str, value: Any) -> TypeError:
    traced = "a traced" if isinstance(value, jax.core.Tracer) else "an"
    return TypeError(
        f"{operation.name}: {name} is a static option and takes a plain Python value, known while tracing; "
        f"got {traced} array of shape {value.shape}"
    )


def _unhashable(layout: Layout, options: Sequence[Any], backend: Any, cfg: Any) -> TypeError:
    for name, value in zip((*layout.option_names, "backend", "cfg"), (*options, backend, cfg), strict=True):
        if isinstance(value, (jax.Array, np.ndarray)):
            return _not_static(layout.operation, name, value)
        try:
            hash(value)
        except TypeError:
            return TypeError(
                f"{layout.operation.name}: {name} is a static option and has to be hashable; "
                f"got {type(value).__name__} {_brief(value)}" + _way_out(name, value)
            )
    return TypeError(f"{layout.operation.name}: an option is not hashable")


def _way_out(name: str, value: Any) -> str:
    if name == "cfg":
        return " (give a frozen Config of the kernel)"
    return " (give a tuple)" if isinstance(value, list) and name != "backend" else ""


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
