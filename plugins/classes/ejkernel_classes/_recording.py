"""The calls that a program makes, from when ``record_invocation`` is called."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from typing import Any

import attrs

from ejkernel_core import Invocation as CoreInvocation
from ejkernel_core._scopes import EMPTY, Scope, ScopeChange

from ._invocation import Invocation


class Recording:
    """Whether calls are recorded, for all threads of the process."""

    def __init__(self) -> None:
        self._recorder: Any = None
        self._numbers = itertools.count(1)
        self._state = ""
        #: A scope that was met, and the one in which its calls are heard: a call that is repeated makes none anew.
        self._last: tuple[Scope, Scope] = (EMPTY, EMPTY)

    def start(self, recorder: Any) -> None:
        """Have this hear of all calls from now on."""
        if self._recorder is not recorder:
            # A number of its own: what was compiled before is compiled again, and heard.
            self._state = f"recorded {next(self._numbers)}"
            self._last = (EMPTY, EMPTY)
            self._recorder = recorder

    def stop(self) -> None:
        """Hear of no more."""
        self._recorder = None

    def listening(self) -> contextlib.AbstractContextManager[None]:
        """Around a call."""
        return contextlib.nullcontext() if self._recorder is None else ScopeChange(self._heard)

    def _heard(self, scope: Scope) -> Scope:
        recorder = self._recorder
        if recorder is None or recorder in scope.listeners:
            return scope
        outer, own = self._last
        if outer is not scope or own is EMPTY:
            state = f"{scope.state};{self._state}"
            own = attrs.evolve(scope, listeners=(*scope.listeners, recorder), state=state)
            self._last = scope, own
        return own


recording = Recording()


def record_invocation(kernel: Any, inv: Any) -> None:
    """Put one invocation of a kernel (an object, or an operation's name) among the recorded ones, and record from now
    on every call that the program makes through this package, backward passes included. No array is kept.

    A function that was jitted by the caller and compiled before is heard of when it is compiled anew.
    ``stop_recording`` ends it.

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
    """Record no more. What was recorded stays, until ``ejkernel_tuning.clear_invocations``.

    >>> stop_recording()
    """
    recording.stop()


def get_invocations() -> list[Invocation]:
    """All calls that were recorded in this process, each once: shapes and options, as the kernels see them.

    A backward pass is a call too: of the same kernel object, or of the operation that computes the gradients.

    >>> all(isinstance(inv, Invocation) for inv in get_invocations())
    True
    """
    import ejkernel_tuning

    return [_seen(core) for core in ejkernel_tuning.get_invocations()]


def _seen(core: CoreInvocation) -> Invocation:
    site = getattr(core.operation, "site", None)
    if site is not None:
        return site.view(core)  # type: ignore[no-any-return]
    parameters = [] if core.operation is None else core.operation.signature.parameters.values()
    by_name = {p.name: core[p.name] for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    defaults = {p.name: p.default for p in parameters}
    args = [core[p.name] for p in parameters if p.name not in by_name]
    while args and args[-1] is None:
        args.pop()
    kwargs = {name: value for name, value in by_name.items() if value is not None and value != defaults[name]}
    return Invocation(core.op, tuple(args), kwargs, core=core)
