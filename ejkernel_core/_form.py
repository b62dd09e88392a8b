"""The form of a call: which of its arguments are arrays and which are options, and its compiled functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from . import _scopes
from ._content import plain
from ._display import brief
from ._lowering import apply_and_restore
from ._operation import NUMBERS, Operation, Restore
from ._plugins import Plugins
from ._request import (
    CallContext,
    Dependencies,
    Request,
    make_request,
    standard_promotion,
)


class CallingPlugins(Plugins):
    """Plugins with the forms of the calls that are made of them: what a ``Registry`` is."""

    __slots__ = ()

    #: By the form of a call: its compiled functions. Emptied whenever a plugin is registered.
    calls: dict[Any, Form]
    #: The plugins without the forms.
    core: Plugins


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


def parse_call(
    registry: CallingPlugins, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Form, list[Any], list[Any]]:
    """The form of the call, its arrays and its options."""
    form_key = (name, len(args), *kwargs)
    form = registry.calls.get(form_key) or _form(registry, form_key, args, kwargs)
    values = (*args, *kwargs.values())
    return form, [values[i] for i in form.array_indices], [values[i] for i in form.option_indices]


def _form(registry: CallingPlugins, form_key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
    # Read before the operation: registering a plugin replaces this dictionary, and an old form must not get into it.
    calls = registry.calls
    operation = registry.operation(form_key[0])
    indices = operation.bind(tuple(range(len(args))), {name: len(args) + i for i, name in enumerate(kwargs)})
    arrays = {name: index for name, index in indices.items() if name in operation.arrays}
    options = {name: index for name, index in indices.items() if name not in operation.arrays}
    form = Form(operation, tuple(arrays), tuple(arrays.values()), tuple(options), tuple(options.values()))
    calls[form_key] = form
    return form


def jitted(form: Form, options: Sequence[Any], context: CallContext, donate: bool) -> Callable[..., Any]:
    """The jitted function of the form's arrays, for these options."""
    for name, value in zip(form.option_names, options, strict=True):
        if isinstance(value, (jax.Array, np.ndarray)):
            from ._validation import not_static

            raise not_static(form.operation.name, name, value)
    check_backend(context.registry, form.operation.name, context.backend)
    form = attrs.evolve(form, functions={})  # so that the function does not contain itself, and is freed at once

    def run(*arrays: Any) -> Any:
        if _scopes.jit_key.value != _scopes.current_scope().digest:
            raise _ScopeMismatch(
                f"{form.operation.name}: another task of this thread is inside overlay_cache or policy_override, or "
                "this thread got its scope from another one (asyncio.to_thread). JAX keeps its jit key per thread, so "
                "no function can be traced here: enter the scope in this thread, and do not await inside it"
            )
        with standard_promotion():
            request, values, restore = prepare_call(form, arrays, options, context)
            return apply_and_restore(request, values, restore)

    # JAX shows these names in compiled code and in errors.
    run.__name__ = run.__qualname__ = form.operation.name
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in form.array_names]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    updated = [*form.operation.aliases.values()] if donate else []
    return jax.jit(run, donate_argnums=[i for i, name in enumerate(form.array_names) if name in updated])


class _ScopeMismatch(RuntimeError):
    """The scope in JAX's jit key is not the current scope."""


def run_form(form: Form, run: Callable[..., Any], dependencies: Dependencies, arrays: Sequence[Any]) -> Any:
    """Run a compiled function of the form. A fault is raised in the words of the operation where it has some."""
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


def prepare_call(
    form: Form, arrays: Sequence[Any], options: Sequence[Any], context: CallContext
) -> tuple[Request, list[Any], Restore]:
    """The request of a call while JAX traces it, its prepared arrays, and what restores the caller's form."""
    operation = form.operation
    operation.check_arrays(dict(zip(form.array_names, arrays, strict=True)))
    # A number may be passed for an array. Under ``jax.disable_jit``, JAX has not converted it.
    arrays = [jnp.asarray(value) if isinstance(value, NUMBERS) else value for value in arrays]
    arguments, restore = operation.prepared(operation.complete(form.values_by_name(arrays, options)))
    return *make_request(context, operation, arguments), restore


def check_backend(registry: Plugins, op: str, backend: Any) -> None:
    """Raise for an unknown or broken backend."""
    if backend is None:
        return
    if not isinstance(backend, str):
        raise TypeError(f"{op}: backend takes a name; got {type(backend).__name__} {brief(backend)}")
    registry.kernel(op, backend)
