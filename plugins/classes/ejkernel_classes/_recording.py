"""Records the calls that a program makes, once ``record_invocation`` was called."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from typing import Any

import attrs

from ejkernel_core import Invocation as CoreInvocation
from ejkernel_core import Scope
from ejkernel_core.extend import EMPTY, ScopeChange

from ._invocation import Invocation


class Recording:
    """Whether calls are recorded, for all threads of the process."""

    def __init__(self) -> None:
        self._recorder: Any = None
        self._numbers = itertools.count(1)
        self._state = ""
        #: The last scope of a call, and the scope with the recorder, so that repeated calls make no new one.
        self._last: tuple[Scope, Scope] = (EMPTY, EMPTY)

    def start(self, recorder: Any) -> None:
        """Record all calls with this recorder from now on."""
        if self._recorder is not recorder:
            # With a new number, functions that were compiled before are compiled again, so their calls are recorded.
            self._state = f"recorded {next(self._numbers)}"
            self._last = (EMPTY, EMPTY)
            self._recorder = recorder

    def stop(self) -> None:
        """Record no more calls."""
        self._recorder = None

    def record_calls(self) -> contextlib.AbstractContextManager[None]:
        """Record the calls in a ``with`` block, if recording is on."""
        return contextlib.nullcontext() if self._recorder is None else ScopeChange(self._with_recorder)

    def _with_recorder(self, scope: Scope) -> Scope:
        recorder = self._recorder
        if recorder is None or recorder in scope.listeners:
            return scope
        outer, recorded_scope = self._last
        if outer is not scope or recorded_scope is EMPTY:
            state = f"{scope.state};{self._state}"
            recorded_scope = attrs.evolve(scope, listeners=(*scope.listeners, recorder), state=state)
            self._last = scope, recorded_scope
        return recorded_scope


recording = Recording()


def record_invocation(kernel: Any, inv: Any) -> None:
    """Record one invocation of a kernel (an object, or the name of an operation), and from now on all calls that the
    program makes through this package, backward passes included. Arrays are not recorded.

    Calls in a function that the caller has jitted are recorded when it is compiled again. ``stop_recording`` ends it.

    >>> import ejkernel_tuning, jax
    >>> ejkernel_tuning.clear_invocations()
    >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
    >>> record_invocation("flash_attention", Invocation("flash_attention", (query, query, query)))
    >>> [inv.abstract_args[0].shape for inv in get_invocations()]
    [(1, 4, 2, 8)]
    >>> stop_recording()
    """
    import ejkernel_tuning
    from ejkernel_tuning._calls import process_recorder

    ejkernel_tuning.record_invocation(kernel, inv)
    recording.start(process_recorder)


def stop_recording() -> None:
    """Record no more calls. Recorded ones stay, until ``ejkernel_tuning.clear_invocations``.

    >>> stop_recording()
    """
    recording.stop()


def get_invocations() -> list[Invocation]:
    """All calls that were recorded in this process, each once, with the shapes and options that kernels see.

    A backward pass is a call of the same kernel object, or of the operation that computes the gradients.

    >>> all(isinstance(inv, Invocation) for inv in get_invocations())
    True
    """
    import ejkernel_tuning

    return [_kernel_invocation(core) for core in ejkernel_tuning.get_invocations()]


def _kernel_invocation(core: CoreInvocation) -> Invocation:
    site = getattr(core.operation, "site", None)
    if site is not None:
        return site.kernel_invocation(core)  # type: ignore[no-any-return]
    parameters = [] if core.operation is None else core.operation.signature.parameters.values()
    by_name = {p.name: core[p.name] for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    defaults = {p.name: p.default for p in parameters}
    args = [core[p.name] for p in parameters if p.name not in by_name]
    while args and args[-1] is None:
        args.pop()
    kwargs = {name: value for name, value in by_name.items() if value is not None and value != defaults[name]}
    return Invocation(core.op, tuple(args), kwargs, core=core)
