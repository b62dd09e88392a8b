"""A call, from its arguments to its results.

The first call with certain options, and certain arrays present, makes a jitted function. Later ones look it up in a
dictionary and call it. JAX's own cache of that function distinguishes shapes, devices and scopes.
"""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from . import _gradients, _scopes
from ._choice import explained
from ._devices import Target, explicit_mesh, target_of
from ._display import brief
from ._errors import EjkernelError, NotDifferentiable
from ._jax_versions import ends_at_caller, hide_frames, without_hidden_frames
from ._kernel import Invocation
from ._keys import abstract, content, plain
from ._lowering import apply, apply_and_restore, apply_inline, has_opaque_kernel
from ._operation import NUMBERS, Operation, Restore
from ._plan import Explanation, Plan
from ._plugins import Plugins
from ._request import (
    CallContext,
    Dependencies,
    Request,
    make_request,
    requests_in,
    standard_promotion,
    used_results,
)

if TYPE_CHECKING:  # imported when arrays are sharded, which most programs do not need
    from ._partitioning import Division

#: How many jitted functions a form of a call keeps, one for each set of options. The oldest one is dropped first.
MAX_COMPILED = 512

# Tracebacks end at the user's line, and locations in programs name it.
hide_frames(os.path.dirname(__file__))


class Registry(Plugins):
    """Operations, kernels and policies, and the calls made with them.

    A new registry has the installed plugins, or those that ``plugins`` selects, as EJKERNEL_PLUGINS does. More can be
    registered with it. ``policies_of`` is another registry: the new one then has no installed plugins, and uses the
    policies and the memory of the other one.
    """

    # Not among the attributes that the core shares.
    __slots__ = ("calls",)

    def __init__(self, plugins: str | None = None, policies_of: Plugins | None = None) -> None:
        self._registry = weakref.ref(self)
        #: By the form of a call: its compiled functions. Emptied whenever a plugin is registered.
        self.calls: dict[Any, Form] = {}
        self.core = Core(self)
        super().__init__(plugins, policies_of)

    def call(
        self,
        op: str,
        /,
        *args: Any,
        backend: str | None = None,
        cfg: Any = None,
        validate: bool = False,
        donate: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the operation ``op`` by the best installed kernel for the device.

        ``backend`` names a kernel and ``cfg`` is a configuration. They are used, or refused with the reason. With
        ``validate=True`` the operation first checks the values of arrays; a traced array has none, and is refused.
        With ``donate=True`` an eager call takes the arguments that the operation updates in place away from the caller.
        All other arguments are the operation's. The call can be jitted, differentiated, vmapped and sharded.

        >>> import ejkernel_core
        >>> query = jnp.ones((1, 4, 2, 8))
        >>> ejkernel_core.call("flash_attention", query, query, query, causal=True).shape
        (1, 4, 2, 8)
        """
        # Every eager call runs this code and that of ``_called``, so each line costs time.
        try:
            return self._called(op, args, backend, cfg, validate, donate, kwargs)
        except Exception as fault:
            fault.__traceback__ = without_hidden_frames(fault.__traceback__)
            raise

    def _called(
        self, op: str, args: tuple[Any, ...], backend: Any, cfg: Any, validate: Any, donate: Any, kwargs: dict[str, Any]
    ) -> Any:
        form, arrays, options = _parse(self, op, args, kwargs)
        scope = _scopes.current_scope()
        try:
            key = (*options, backend, cfg, donate, content((*options, cfg)), scope.digest)
            function = form.functions.get(key)
        except Exception as fault:  # of any type: the class of an option may be a user's own
            names = (*form.option_names, "backend", "cfg", "donate")
            static = dict(zip(names, (*options, backend, cfg, donate), strict=True))
            from ._validation import unhashable

            raise unhashable(op, static, lambda: self.kernels(op)[0]) from fault
        if function is None:
            values = (*options, backend)
            if (plain_values := plain(values)) is not values:
                return self._call_plain(op, form, arrays, plain_values, cfg, validate, donate)
        if donate is not False:
            from ._donation import check_donation

            check_donation(form.operation, dict(zip(form.array_names, arrays, strict=True)), donate)
        if validate is not False:
            _check_values(self, form, arrays, options, validate)
        if function is not None:
            return _run(form, *function, arrays)
        context = CallContext(self.core, backend, cfg, scope)
        run = _jit(form, options, context, donate)
        results = _run(form, run, context.dependencies, arrays)
        if len(form.functions) >= MAX_COMPILED:
            form.functions.pop(next(iter(form.functions)), None)
        # Stored after the call, so that a call that fails makes no other function be dropped. If a record was stored
        # after its choice, the function is not, and the next call chooses again.
        if self.is_unchanged(context.dependencies.kinds):
            form.functions[key] = run, context.dependencies
        return results

    def _call_plain(
        self, op: str, form: Form, arrays: Sequence[Any], values: tuple[Any, ...], cfg: Any, validate: Any, donate: Any
    ) -> Any:
        """The call with the plain values of its options and backend, by the function that was compiled for these."""
        *options, backend = values
        arguments = dict(zip((*form.array_names, *form.option_names), (*arrays, *options), strict=True))
        return self._called(op, (), backend, cfg, validate, donate, arguments)

    @ends_at_caller
    def invocation(
        self, op: str, /, *args: Any, backend: str | None = None, cfg: Any = None, **kwargs: Any
    ) -> Invocation:
        """The invocation that kernels and policies get for this call. Configurations are stored under its ``key``.

        >>> import ejkernel_core
        >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
        >>> inv = ejkernel_core.invocation("flash_attention", query, query, query, causal=True)
        >>> inv["causal"], inv["query"].shape
        (True, (1, 4, 2, 8))
        """
        call = abstract_call(self, op, args, kwargs, backend, cfg)
        return call.request.invocation(call.avals, call.target)

    @ends_at_caller
    def plan(self, op: str, /, *args: Any, backend: str | None = None, cfg: Any = None, **kwargs: Any) -> Plan:
        """What ``call`` would run, and why. Arrays may be ``jax.ShapeDtypeStruct``. Raises the errors of the call.

        Nothing is measured. Where a call would measure, the plan says so. It is for the platform on which the call
        would run here, also under an abstract mesh of another one, and its text names the device.

        >>> import ejkernel_core
        >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
        >>> ejkernel_core.plan("flash_attention", query, query, query, backend="reference").kernel.name
        'flash_attention.reference'
        """
        call = abstract_call(self, op, args, kwargs, backend, cfg)
        return call.request.plan(call.avals, call.target)

    @ends_at_caller
    def explain(
        self, op: str, /, *args: Any, backend: str | None = None, cfg: Any = None, **kwargs: Any
    ) -> Explanation:
        """The plans of a call and of its gradients, and why each other kernel was not chosen. Print it to read it.

        The plans are for the same device as that of ``plan``.

        >>> import ejkernel_core
        >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
        >>> explanation = ejkernel_core.explain("flash_attention", query, query, query)
        >>> explanation.op, explanation.backward.op
        ('flash_attention', 'flash_attention_bwd')
        """
        from . import environment

        call = abstract_call(self, op, args, kwargs, backend, cfg)
        explanation = _explain(call.request, call.avals, call.target)
        explanation = attrs.evolve(explanation, division=call.division, remarks=environment.remarks())
        if explanation.plan is None or call.request.operation.backward is None:
            return explanation
        try:
            backward, avals = call.backward()
        except NotDifferentiable as error:
            return attrs.evolve(
                explanation, backward=Explanation(str(call.request.operation.backward), None, str(error))
            )
        return attrs.evolve(explanation, backward=_explain(backward, avals, call.target))


class Core(Plugins):
    """A registry without its compiled calls. It shares all other attributes with the registry.

    It is in the parameters of the primitive, so whatever has a program of JAX has it. JAX keeps the program of a
    function for as long as there is the function. If the program had the registry, which has the function, neither
    would ever be freed.
    """

    def __init__(self, registry: Registry) -> None:
        self.__dict__ = registry.__dict__

    def call(self, op: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call an operation by the registry: see ``Invocation.call``."""
        return self.registry().call(op, *args, **kwargs)

    def registry(self) -> Registry:
        """The registry, or a new one of the same plugins where the program has outlived it."""
        registry: Registry | None = self._registry()
        if registry is None:
            registry = Registry.__new__(Registry)
            registry.__dict__ = self.__dict__
            registry.calls = {}
            self._registry = weakref.ref(registry)
        return registry


@attrs.frozen(eq=False, repr=False)
class Form:
    """The form of a call: which arguments are passed and how, and which of them are arrays and which are options."""

    operation: Operation
    array_names: tuple[str, ...]
    #: Their indices among all values of the call, positional ones first.
    array_indices: tuple[int, ...]
    option_names: tuple[str, ...]
    option_indices: tuple[int, ...]
    #: By options and scope: the jitted function, and what its choice depends on.
    functions: dict[Any, tuple[Callable[..., Any], Dependencies]] = attrs.field(factory=dict)

    def values_by_name(self, arrays: Sequence[Any], options: Sequence[Any]) -> dict[str, Any]:
        """The values of the call by the names of their parameters."""
        return dict(zip((*self.array_names, *self.option_names), (*arrays, *map(plain, options)), strict=True))

    def forget(self, kind: tuple[str, str]) -> None:
        """Drop the functions whose choice depends on keys of this kind."""
        for key in [key for key, (_, dependencies) in list(self.functions.items()) if kind in dependencies.kinds]:
            self.functions.pop(key, None)


# -- from the values of a call to a compiled function ------------------------------------------------------------------


def _parse(
    registry: Registry, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Form, list[Any], list[Any]]:
    """The form of the call, its arrays and its options."""
    form_key = (name, len(args), *kwargs)
    form = registry.calls.get(form_key) or _form(registry, form_key, args, kwargs)
    values = (*args, *kwargs.values())
    return form, [values[i] for i in form.array_indices], [values[i] for i in form.option_indices]


def _form(registry: Registry, form_key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
    # Read before the operation: registering a plugin replaces this dictionary, and an old form must not get into it.
    calls = registry.calls
    operation = registry.operation(form_key[0])
    indices = operation.bind(tuple(range(len(args))), {name: len(args) + i for i, name in enumerate(kwargs)})
    arrays = {name: index for name, index in indices.items() if name in operation.arrays}
    options = {name: index for name, index in indices.items() if name not in operation.arrays}
    form = Form(operation, tuple(arrays), tuple(arrays.values()), tuple(options), tuple(options.values()))
    calls[form_key] = form
    return form


def _jit(form: Form, options: Sequence[Any], context: CallContext, donate: bool) -> Callable[..., Any]:
    """The jitted function of the form's arrays, for these options."""
    for name, value in zip(form.option_names, options, strict=True):
        if isinstance(value, (jax.Array, np.ndarray)):
            from ._validation import not_static

            raise not_static(form.operation.name, name, value)
    _check_backend(context.registry, form.operation.name, context.backend)
    form = attrs.evolve(form, functions={})  # so that the function does not contain itself, and is freed at once

    def run(*arrays: Any) -> Any:
        if _scopes.jit_key.value != _scopes.current_scope().digest:
            raise _ScopeMismatch(
                f"{form.operation.name}: another task of this thread is inside overlay_cache or policy_override, or "
                "this thread got its scope from another one (asyncio.to_thread). JAX keeps its jit key per thread, so "
                "no function can be traced here: enter the scope in this thread, and do not await inside it"
            )
        with standard_promotion():
            request, values, restore = _prepare(form, arrays, options, context)
            return apply_and_restore(request, values, restore)

    # JAX shows these names in compiled code and in errors.
    run.__name__ = run.__qualname__ = form.operation.name
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in form.array_names]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    updated = [*form.operation.aliases.values()] if donate else []
    return jax.jit(run, donate_argnums=[i for i, name in enumerate(form.array_names) if name in updated])


class _ScopeMismatch(RuntimeError):
    """The scope in JAX's jit key is not the current scope."""


def _run(form: Form, run: Callable[..., Any], dependencies: Dependencies, arrays: Sequence[Any]) -> Any:
    try:
        return run(*arrays)
    except jax.errors.JaxRuntimeError as error:
        fault, dependencies.fault = dependencies.fault, None  # another thread may have compiled the same call meanwhile
        if fault is None or type(fault).__qualname__ not in str(error):
            raise
        raise fault from error  # what was raised while the compiler partitioned the call
    except (TypeError, ValueError, OverflowError) as error:
        from ._validation import clearer_error  # imported where something is wrong

        clearer = clearer_error(form.operation, dict(zip(form.array_names, arrays, strict=True)), error)
        if clearer is None:
            raise
        raise clearer from error
    except _ScopeMismatch:
        # JAX's jit key has the scope of another task of this thread. An eager call is traced again with the right key.
        # Inside an outer trace this would not help: JAX would cache the outer function under the wrong key.
        if any(isinstance(array, jax.core.Tracer) for array in arrays):
            raise
        with _scopes.jit_key_of_scope():
            return run(*arrays)
    except RuntimeError as error:
        from ._donation import deleted_argument

        deleted = deleted_argument(form.operation, dict(zip(form.array_names, arrays, strict=True)))
        if deleted is None:
            raise
        raise deleted from error


def _prepare(
    form: Form, arrays: Sequence[Any], options: Sequence[Any], context: CallContext
) -> tuple[Request, list[Any], Restore]:
    """The request of a call while JAX traces it, its prepared arrays, and what restores the caller's form."""
    operation = form.operation
    operation.check_arrays(dict(zip(form.array_names, arrays, strict=True)))
    # A number may be passed for an array. Under ``jax.disable_jit``, JAX has not converted it.
    arrays = [jnp.asarray(value) if isinstance(value, NUMBERS) else value for value in arrays]
    arguments, restore = operation.prepared(operation.complete(form.values_by_name(arrays, options)))
    return *make_request(context, operation, arguments), restore


def _check_backend(registry: Plugins, op: str, backend: Any) -> None:
    """Raise for an unknown or broken backend."""
    if backend is None:
        return
    if not isinstance(backend, str):
        raise TypeError(f"{op}: backend takes a name; got {type(backend).__name__} {brief(backend)}")
    registry.kernel(op, backend)


def _check_values(registry: Registry, form: Form, arrays: Sequence[Any], options: Sequence[Any], validate: Any) -> None:
    def trace(*arrays: Any) -> list[Any]:
        with standard_promotion():
            return _prepare(form, arrays, options, CallContext(registry.core))[1]

    from ._validation import check_values

    shapes = functools.partial(jax.eval_shape, trace)
    check_shapes = functools.partial(_run, form, shapes, Dependencies(), arrays)
    check_values(form.operation, form.values_by_name(arrays, options), validate, check_shapes)


# -- calls that are described but not run ------------------------------------------------------------------------------


@attrs.frozen(eq=False, repr=False)
class AbstractCall:
    """A call that is not run: its request and the shapes of its prepared arrays on one device, that device, and the
    function that restores the caller's form of the results.
    """

    request: Request
    #: The request of the call on all devices, by which its gradients are computed: those of one may have partial sums.
    undivided: Request
    avals: list[Any]
    target: Target
    restore: Restore
    #: The prepared arrays, if ``abstract_call`` was to include them, none is abstract, and they are on one device.
    values: list[Any] | None = None
    #: How it is divided over several devices.
    division: Division | None = None

    def backward(self) -> tuple[Request, list[Any]]:
        """The request of the backward operation, for all gradients, and the shapes of its arrays."""
        results = self.undivided.outputs(self.avals)
        return self.backward_of(self.avals, results, results)

    def backward_of(
        self, arrays: Sequence[Any], results: Sequence[Any], cotangents: Sequence[Any]
    ) -> tuple[Request, list[Any]]:
        """The same request for these arrays, results and cotangents, and its arrays. Those may be abstract.

        The cotangent of a result that the caller does not get, or that has no gradient, is dropped.
        """
        is_used = used_results(self.restore, self.undivided.outputs(self.avals))
        used_cotangents = [
            ct if used and _gradients.is_inexact(ct) else None for ct, used in zip(cotangents, is_used, strict=True)
        ]
        avals = dict(zip(self.request.arrays, self.avals, strict=True))
        differentiable = self.request.operation.differentiable
        wrt = tuple(name for name, aval in avals.items() if name in differentiable and _gradients.is_inexact(aval))
        backward, values = _gradients.backward_request(self.undivided, arrays, results, used_cotangents, wrt)
        if self.division is None or self.division.shards is None:
            return backward, values
        shards = attrs.evolve(self.division.shards, rule=backward.partitioning(values))
        return backward.with_options(shards.options), values


def abstract_call(
    registry: Registry,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: str | None = None,
    cfg: Any = None,
    has_values: bool = False,
) -> AbstractCall:
    """A call, described without running it; with ``has_values``, its prepared arrays are included."""
    from ._sharding import as_explicit, is_explicit
    from ._validation import on_other_mesh

    form, arrays, options, context = _parse_abstract(registry, name, args, kwargs, backend, cfg)
    context = attrs.evolve(context, scope=attrs.evolve(context.scope, may_measure=False))
    prepared: list[tuple[Request, Restore]] = []

    def trace(*arrays: Any) -> list[Any]:
        with standard_promotion():
            request, values, restore = _prepare(form, arrays, options, context)
        prepared.append((request, restore))
        return values

    error = on_other_mesh(name, dict(zip(form.array_names, arrays, strict=True)))
    if error is not None:
        raise error
    shapes = functools.partial(jax.eval_shape, trace)
    avals = _run(form, shapes, context.dependencies, [*map(as_explicit, arrays)])
    (request, restore), call_target = prepared[0], target_of(arrays)
    division = _division(request, avals, call_target, all(map(is_explicit, arrays)))
    on_shard = request
    if division is not None and division.shards is not None:
        on_shard, has_values = request.with_options(division.shards.options), False
        avals = division.shards.shapes(avals)
    values = trace(*arrays) if has_values and not any(map(_is_abstract, arrays)) else None
    return AbstractCall(on_shard, request, avals, call_target, restore, values, division)


def _division(request: Request, avals: Sequence[Any], call_target: Target, is_explicit: bool) -> Division | None:
    """How the call is divided over the mesh of its arrays; None where they are on one device."""
    mesh = explicit_mesh(avals)
    if mesh is None:
        return None
    from ._partitioning import Division
    from ._sharding import shards_of_types, specs_of_types

    devices = mesh.size
    if not request.may_be_sharded:
        note = f"{request.operation.name} does not say how it may be sharded, so the plan is for the whole arrays"
        return Division(devices, note=note)
    if not (is_explicit or has_opaque_kernel(request, avals, call_target)):
        return Division(devices, note="the compiler partitions the kernel; the plan is for the whole arrays")
    shards = shards_of_types(request.partitioning(avals), avals, mesh)
    return Division(devices, None if shards.is_whole else shards, shards.gathers(specs_of_types(avals)))


def results_and_restore(
    registry: Registry, name: str, kwargs: dict[str, Any], backend: str | None, by_jax: bool
) -> tuple[tuple[Any, ...], Restore]:
    """All results of a call as its kernel returns them, and the function that restores the caller's form. For use
    while JAX traces. They are differentiated as those of a call; with ``by_jax``, JAX differentiates the kernel itself.
    """
    form, arrays, options, context = _parse_abstract(registry, name, (), kwargs, backend)
    request, values, restore = _prepare(form, arrays, options, context)
    return (apply_inline if by_jax else apply)(request, values), restore


def _parse_abstract(
    registry: Registry,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: str | None,
    cfg: Any = None,
) -> tuple[Form, list[Any], list[Any], CallContext]:
    if "validate" in kwargs:
        raise TypeError(f"{name}: validate checks values, but only shapes are used here: pass it to call or omit it")
    if "donate" in kwargs:
        raise TypeError(f"{name}: donate is for a call that runs, and nothing runs here: pass it to call or omit it")
    form, arrays, options = _parse(registry, name, args, kwargs)
    backend = plain(backend)
    _check_backend(registry, name, backend)
    return form, arrays, options, CallContext(registry.core, backend, cfg, _scopes.current_scope())


def _is_abstract(array: Any) -> bool:
    return isinstance(array, (jax.core.Tracer, jax.ShapeDtypeStruct))


def _explain(request: Request, avals: Sequence[Any], call_target: Target) -> Explanation:
    op = request.operation.name
    try:
        plan = explained(request.plan(avals, call_target), request.registry.kernels(op)[0])
    except EjkernelError as error:
        return Explanation(op, None, str(error), verdicts=getattr(error, "verdicts", ()))
    parts = tuple(_explain(part, values, call_target) for part, values in _parts(request, plan, avals))
    return Explanation(op, plan, None, verdicts=plan.verdicts, parts=parts)


def _parts(request: Request, plan: Plan, avals: Sequence[Any]) -> list[tuple[Request, list[Any]]]:
    """The calls that the kernel makes, each once, and their arrays. None of a kernel that cannot be traced here."""
    if not plan.kernel.parts:
        return []
    try:
        # On one device, also inside ``jax.set_mesh``: these are the arrays of a shard.
        with request.settings.in_effect(), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            program = jax.make_jaxpr(lambda *arrays: request.run(plan, arrays))(*map(abstract, avals))
    except Exception:  # of any type, and about a call that runs later, if at all
        return []
    parts: dict[Any, tuple[Request, list[Any]]] = {}
    for part, values in requests_in(program.jaxpr):
        elements = part.elements(values)
        parts.setdefault((part.operation.name, part.content, str(elements)), (part, elements))
    return list(parts.values())
