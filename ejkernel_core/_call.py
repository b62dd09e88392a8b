"""A call, from its arguments to its results.

The first call with certain options, and certain arrays present, makes a jitted function. Later ones look it up in a
dictionary and call it. JAX's own cache of that function distinguishes shapes, devices and scopes.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Sequence
from typing import Any

import attrs
import jax

from . import _scopes
from ._content import content, plain
from ._errors import NotDifferentiable
from ._explain import abstract_call, explain_request
from ._form import CallingPlugins, Form, jitted, parse_call, prepare_call, run_form
from ._invocation import Invocation
from ._jax_versions import ends_at_caller, hide_frames, without_hidden_frames
from ._plan import Explanation, Plan
from ._plugins import Plugins
from ._request import (
    CallContext,
    Dependencies,
    standard_promotion,
)

#: How many jitted functions a form of a call keeps, one for each set of options. The oldest one is dropped first.
MAX_COMPILED = 512

# Tracebacks end at the user's line, and locations in programs name it.
hide_frames(os.path.dirname(__file__))


class Registry(CallingPlugins):
    """Operations, kernels and policies, and the calls made with them.

    A new registry has the installed plugins, or those that ``plugins`` selects, as EJKERNEL_PLUGINS does. More can be
    registered with it. ``policies_of`` is another registry: the new one then has no installed plugins, and uses the
    policies and the memory of the other one.
    """

    # Not among the attributes that the core shares.
    __slots__ = ("calls",)

    def __init__(self, plugins: str | None = None, policies_of: Plugins | None = None) -> None:
        self._registry = weakref.ref(self)
        self.calls = {}
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
        >>> query = jax.numpy.ones((1, 4, 2, 8))
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
        form, arrays, options = parse_call(self, op, args, kwargs)
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
            return run_form(form, *function, arrays)
        context = CallContext(self.core, backend, cfg, scope)
        run = jitted(form, options, context, donate)
        results = run_form(form, run, context.dependencies, arrays)
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
        explanation = explain_request(call.request, call.avals, call.target)
        explanation = attrs.evolve(explanation, division=call.division, remarks=environment.remarks())
        if explanation.plan is None or call.request.operation.backward is None:
            return explanation
        try:
            backward, avals = call.backward()
        except NotDifferentiable as error:
            return attrs.evolve(
                explanation, backward=Explanation(str(call.request.operation.backward), None, str(error))
            )
        return attrs.evolve(explanation, backward=explain_request(backward, avals, call.target))


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


def _check_values(registry: Registry, form: Form, arrays: Sequence[Any], options: Sequence[Any], validate: Any) -> None:
    def trace(*arrays: Any) -> list[Any]:
        with standard_promotion():
            return prepare_call(form, arrays, options, CallContext(registry.core))[1]

    from ._validation import check_values

    shapes = functools.partial(jax.eval_shape, trace)
    check_shapes = functools.partial(run_form, form, shapes, Dependencies(), arrays)
    check_values(form.operation, form.values_by_name(arrays, options), validate, check_shapes)
