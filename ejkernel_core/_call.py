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
from ._display import brief
from ._errors import NoConfig, NoKernel, NotDifferentiable, PluginError, Unsupported
from ._kernel import Invocation
from ._keys import content, sharding_fingerprint
from ._lowering import Kinds, Request, Terms, apply, as_request, inlined, standard_promotion
from ._operation import NUMBERS, Operation, Restore
from ._plan import Explanation, Plan
from ._plugins import Plugins
from ._validation import check_values, clearer_error, not_static, unhashable

#: How many compiled functions are kept for one way of writing a call: one for each set of options, the oldest go first.
KEPT = 512


class Registry(Plugins):
    """Operations, kernels and policies, and the calls made with them.

    A new registry knows what is installed (``plugins`` as in EJKERNEL_PLUGINS chooses among it) and what is registered
    with it afterwards. One that takes the ``policies_of`` another, and what that one remembers, starts with these.
    """

    def call(
        self, op: str, /, *args: Any, backend: str | None = None, cfg: Any = None, validate: bool = False, **kwargs: Any
    ) -> Any:
        """Run the operation ``op`` by the best installed kernel for the device at hand.

        ``backend`` and ``cfg`` name a kernel or its configuration; they are obeyed, or refused with the reason. With
        ``validate=True`` the operation looks at the values of arrays first; where one is traced, it has none, and the
        call is refused. Everything else is for the operation. The call can be jitted, differentiated, vmapped and
        sharded.

        >>> import ejkernel_core
        >>> query = jnp.ones((1, 4, 2, 8))
        >>> ejkernel_core.call("flash_attention", query, query, query, causal=True).shape
        (1, 4, 2, 8)
        """
        # This is the way of every eager call: each line costs its users time.
        form, arrays, options = _parse(self, op, args, kwargs)
        scope = _scopes.current()
        sharding = _sharding(form, arrays)
        try:
            key = (*options, backend, cfg, content((*options, cfg)), scope.digest, sharding)
            compiled = form.compiled.get(key)
        except TypeError:
            static = dict(zip((*form.option_names, "backend", "cfg"), (*options, backend, cfg), strict=True))
            raise unhashable(op, static) from None
        if validate is not False:
            _check_values(self, form, arrays, options, validate)
        if compiled is not None:
            return _run(form, compiled[0], arrays)
        terms, changes = Terms(self, backend, cfg, scope, sharding), self.changes
        run = _compile(form, options, terms)
        results = _run(form, run, arrays)
        if len(form.compiled) >= KEPT:
            form.compiled.pop(next(iter(form.compiled)), None)
        # Only now: a call that was rejected takes no other's place. What may be known better by now is chosen anew.
        if self.is_unchanged(terms.kinds.seen, changes):
            form.compiled[key] = run, terms.kinds
        return results

    def invocation(
        self, op: str, /, *args: Any, backend: str | None = None, cfg: Any = None, **kwargs: Any
    ) -> Invocation:
        """What kernels and policies see of such a call; its ``key`` is what a configuration is remembered by.

        >>> import ejkernel_core
        >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
        >>> inv = ejkernel_core.invocation("flash_attention", query, query, query, causal=True)
        >>> inv["causal"], inv["query"].shape
        (True, (1, 4, 2, 8))
        """
        question = ask(self, op, args, kwargs, backend, cfg)
        return question.request.invocation(question.avals, question.target)

    def plan(self, op: str, /, *args: Any, backend: str | None = None, cfg: Any = None, **kwargs: Any) -> Plan:
        """What ``call`` would run, and why; arrays may be ``jax.ShapeDtypeStruct``. Raises what the call would raise.

        Nothing is measured: where a call would measure, the plan says so.

        >>> import ejkernel_core
        >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
        >>> ejkernel_core.plan("flash_attention", query, query, query, backend="reference").kernel.name
        'flash_attention.reference'
        """
        question = ask(self, op, args, kwargs, backend, cfg)
        return question.request.plan(question.avals, question.target)

    def explain(
        self, op: str, /, *args: Any, backend: str | None = None, cfg: Any = None, **kwargs: Any
    ) -> Explanation:
        """The plan of a call and of its gradients, with every other kernel and its reason; print it.

        >>> import ejkernel_core
        >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
        >>> explanation = ejkernel_core.explain("flash_attention", query, query, query)
        >>> explanation.op, explanation.backward.op
        ('flash_attention', 'flash_attention_bwd')
        """
        question = ask(self, op, args, kwargs, backend, cfg)
        explanation = _explain(question.request, question.avals, question.target)
        if explanation.plan is None or question.request.operation.backward is None:
            return explanation
        try:
            backward, avals = question.backward()
        except NotDifferentiable as error:
            return attrs.evolve(
                explanation, backward=Explanation(str(question.request.operation.backward), None, str(error))
            )
        return attrs.evolve(explanation, backward=_explain(backward, avals, question.target))


@attrs.frozen(eq=False, repr=False)
class Form:
    """One way of writing a call of an operation: which of its values are arrays and which are options."""

    operation: Operation
    array_names: tuple[str, ...]
    array_places: tuple[int, ...]
    option_names: tuple[str, ...]
    option_places: tuple[int, ...]
    #: By options and terms: what is called, and the kinds of keys that it has chosen by.
    compiled: dict[Any, tuple[Callable[..., Any], Kinds]] = attrs.field(factory=dict)

    def named(self, arrays: Sequence[Any], options: Sequence[Any]) -> dict[str, Any]:
        """The values that the call gives, by the names of their parameters."""
        return dict(zip((*self.array_names, *self.option_names), (*arrays, *options), strict=True))

    def forget(self, kind: tuple[str, str]) -> None:
        """Have the calls choose anew that have chosen by keys of this kind."""
        for key in [key for key, (_, kinds) in list(self.compiled.items()) if kind in kinds.seen]:
            self.compiled.pop(key, None)


# -- from the values of a call to a compiled function ------------------------------------------------------------------


def _parse(
    registry: Plugins, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Form, list[Any], list[Any]]:
    """The form of the call, its arrays and its options."""
    written = (name, len(args), *kwargs)
    form = registry.calls.get(written) or _form(registry, written, args, kwargs)
    values = (*args, *kwargs.values())
    return form, [values[place] for place in form.array_places], [values[place] for place in form.option_places]


def _form(registry: Plugins, written: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
    calls = registry.calls  # before the operation is read: what is registered meanwhile starts with another one
    operation = registry.operation(written[0])
    places = operation.bind(tuple(range(len(args))), {name: len(args) + i for i, name in enumerate(kwargs)})
    arrays = {name: place for name, place in places.items() if name in operation.arrays}
    options = {name: place for name, place in places.items() if name not in operation.arrays}
    form = Form(operation, tuple(arrays), tuple(arrays.values()), tuple(options), tuple(options.values()))
    calls[written] = form
    return form


def _sharding(form: Form, arrays: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """The arrays that are sharded over several devices, and how: known here, and not while JAX traces or lowers."""
    if all(map(_is_on_one_device, arrays)):
        return ()
    shardings = (
        (n, sharding_fingerprint(a)) for n, a in zip(form.array_names, arrays, strict=True) if hasattr(a, "shape")
    )
    return tuple((name, fingerprint) for name, fingerprint in shardings if fingerprint)


def _is_on_one_device(array: Any) -> bool:
    """Whether this is known at once."""
    sharding = getattr(array, "sharding", None)
    if sharding is None:
        return not isinstance(array, jax.core.Tracer)
    return type(sharding) is jax.sharding.SingleDeviceSharding


def _compile(form: Form, options: Sequence[Any], terms: Terms) -> Callable[..., Any]:
    for name, value in zip(form.option_names, options, strict=True):
        if isinstance(value, (jax.Array, np.ndarray)):
            raise not_static(form.operation.name, name, value)
    _check_backend(terms.registry, form.operation.name, terms.backend)

    def run(*arrays: Any) -> Any:
        if _scopes.jit_key.value != _scopes.current().digest:
            raise _ScopeMismatch(
                f"{form.operation.name}: another task of this thread is inside overlay_cache or policy_override, or "
                "this thread has its scope from another (asyncio.to_thread). JAX keeps its jit key for a thread, so a "
                "function cannot be traced here: enter the scope in this thread, and leave it without an await between"
            )
        with standard_promotion():
            request, values, restore = _prepare(form, arrays, options, terms)
            return restore(apply(request, values))

    # What the compiled code, and JAX's own errors, call the function and its arguments.
    run.__name__ = run.__qualname__ = form.operation.name
    names = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in form.array_names]
    run.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    return jax.jit(run)


class _ScopeMismatch(RuntimeError):
    """JAX's jit key holds another scope than the one that is entered."""


def _run(form: Form, run: Callable[..., Any], arrays: Sequence[Any]) -> Any:
    try:
        return run(*arrays)
    except (TypeError, ValueError, OverflowError) as error:
        clearer = clearer_error(form.operation, dict(zip(form.array_names, arrays, strict=True)), error)
        if clearer is None:
            raise
        raise clearer from error
    except _ScopeMismatch:
        # Another task of this thread entered a scope, and JAX's key is that one's. Only we look into this function;
        # what is being traced around it would be kept under the wrong key.
        if any(isinstance(array, jax.core.Tracer) for array in arrays):
            raise
        with _scopes.jit_key_of_scope():
            return run(*arrays)


def _prepare(
    form: Form, arrays: Sequence[Any], options: Sequence[Any], terms: Terms
) -> tuple[Request, list[Any], Restore]:
    """The request of a call, its prepared arrays, and how its results are given back; to be traced."""
    operation = form.operation
    operation.check_arrays(dict(zip(form.array_names, arrays, strict=True)))
    # Numbers are arrays too; under ``jax.disable_jit`` nobody has made them so.
    arrays = [jnp.asarray(value) if isinstance(value, NUMBERS) else value for value in arrays]
    arguments, restore = operation.prepared(operation.complete(form.named(arrays, options)))
    return *as_request(terms, operation, arguments), restore


def _check_backend(registry: Plugins, op: str, backend: Any) -> None:
    """An unknown or broken backend is refused before anything else is done."""
    if backend is None:
        return
    if not isinstance(backend, str):
        raise TypeError(f"{op}: backend takes a name; got {type(backend).__name__} {brief(backend)}")
    registry.kernel(op, backend)


def _check_values(registry: Plugins, form: Form, arrays: Sequence[Any], options: Sequence[Any], validate: Any) -> None:
    def trace(*arrays: Any) -> list[Any]:
        with standard_promotion():
            return _prepare(form, arrays, options, Terms(registry))[1]

    shapes = functools.partial(_run, form, functools.partial(jax.eval_shape, trace), arrays)
    check_values(form.operation, form.named(arrays, options), validate, shapes)


# -- questions about a call that is not made ---------------------------------------------------------------------------


@attrs.frozen(eq=False, repr=False)
class Question:
    """A call that is not made: its request, the shapes of its prepared arrays, where it would run, and how its results
    would be given back.
    """

    request: Request
    avals: list[Any]
    target: Target
    restore: Restore
    #: The prepared arrays, where these were wanted and are all there.
    values: list[Any] | None = None

    def backward(self) -> tuple[Request, list[Any]]:
        """The call of the backward operation, of all gradients there are, and the shapes of its arrays."""
        results = self.request.outputs(self.avals)
        return self.gradients(self.avals, results, results)

    def gradients(
        self, arrays: Sequence[Any], results: Sequence[Any], cotangents: Sequence[Any]
    ) -> tuple[Request, list[Any]]:
        """The same with these arrays. A result that the caller gets nothing of has no cotangent."""
        jaxpr = jax.make_jaxpr(self.restore)(tuple(self.request.outputs(self.avals))).jaxpr
        read = {id(variable) for eqn in jaxpr.eqns for variable in eqn.invars} | {id(v) for v in jaxpr.outvars}
        needed = [ct if id(v) in read else None for ct, v in zip(cotangents, jaxpr.invars, strict=True)]
        inexact = (
            n for n, a in zip(self.request.arrays, self.avals, strict=True) if jnp.issubdtype(a.dtype, jnp.inexact)
        )
        wrt = tuple(name for name in inexact if name in self.request.operation.differentiable)
        return _gradients.backward_request(self.request, arrays, results, needed, wrt)


def ask(
    registry: Plugins,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: str | None = None,
    cfg: Any = None,
    concrete: bool = False,
) -> Question:
    """The question that a call would be; ``concrete``: with its prepared arrays."""
    form, arrays, options, terms = _open(registry, name, args, kwargs, backend, cfg)
    terms = attrs.evolve(terms, scope=attrs.evolve(terms.scope, may_measure=False))
    prepared: list[tuple[Request, Restore]] = []

    def trace(*arrays: Any) -> list[Any]:
        with standard_promotion():
            request, values, restore = _prepare(form, arrays, options, terms)
        prepared.append((request, restore))
        return values

    avals = _run(form, functools.partial(jax.eval_shape, trace), arrays)
    request, restore = prepared[0]
    values = trace(*arrays) if concrete and not any(map(_is_abstract, arrays)) else None
    return Question(request, avals, target(current_platform(arrays)), restore, values)


def whole(
    registry: Plugins, name: str, kwargs: dict[str, Any], backend: str | None, by_jax: bool
) -> tuple[tuple[Any, ...], Restore]:
    """All results of a call as its kernel gives them, and how the caller gets them; to be traced. They have the
    derivative of a call, or with ``by_jax`` the one that JAX makes of the kernel.
    """
    form, arrays, options, terms = _open(registry, name, (), kwargs, backend)
    request, values, restore = _prepare(form, arrays, options, terms)
    return (inlined if by_jax else apply)(request, values), restore


def _open(
    registry: Plugins,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: str | None,
    cfg: Any = None,
) -> tuple[Form, list[Any], list[Any], Terms]:
    if "validate" in kwargs:
        raise TypeError(f"{name}: validate looks at values, and this at shapes alone: give it to call, or leave it out")
    form, arrays, options = _parse(registry, name, args, kwargs)
    _check_backend(registry, name, backend)
    return form, arrays, options, Terms(registry, backend, cfg, _scopes.current(), _sharding(form, arrays))


def _is_abstract(array: Any) -> bool:
    return isinstance(array, (jax.core.Tracer, jax.ShapeDtypeStruct))


def _explain(request: Request, avals: Sequence[Any], where: Target) -> Explanation:
    op = request.operation.name
    try:
        plan = with_space_faults(request.plan(avals, where), request.registry.kernels(op)[0])
    except (NoKernel, NoConfig, PluginError, Unsupported) as error:
        return Explanation(op, None, str(error), verdicts=getattr(error, "verdicts", ()))
    return Explanation(op, plan, None, verdicts=plan.verdicts)
