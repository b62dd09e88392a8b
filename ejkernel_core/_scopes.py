"""What holds for a part of a program: configurations laid over all others, and a policy of tuning.

A scope is an immutable value. It is in a ``ContextVar``, so that it is a thread's and a task's own, and its content is
in JAX's jit key: a function that was compiled under equal content is not traced again, and any other is.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import numbers
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import attrs
import jax

from ._errors import RecordError
from ._kernel import Candidate, Invocation, fitting
from ._keys import Key, short_hash, stable_json
from ._records import Record, as_record

MODES = ("off", "on_miss", "error_on_miss")


def _is_mode(policy: Any, field: Any, value: Any) -> None:
    if not (isinstance(value, str) and value in MODES):
        *others, last = MODES
        raise ValueError(f"{field.name}: takes {', '.join(others)} or {last}; got {value!r:.60}")


def _is_seconds(policy: Any, field: Any, value: Any) -> None:
    message = f"{field.name}: takes seconds above 0; got {value!r:.60}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(message)
    if not 0 < float(value) < math.inf:
        raise ValueError(message)


def _is_bool(policy: Any, field: Any, value: Any) -> None:
    _check_bool(field.name, value)


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: takes True or False; got {value!r:.60}")


@attrs.frozen
class AutotunePolicy:
    """What to do for a call that nothing is remembered for.

    "off" takes the heuristic, "on_miss" measures, "error_on_miss" raises ``NoConfig``.
    """

    mode: str = attrs.field(default="off", validator=_is_mode)
    #: How long one measurement may take, compiling included.
    budget_s: float = attrs.field(default=60.0, validator=_is_seconds)
    #: Whether a thread waits for another that measures the same; if not, it takes the heuristic.
    wait: bool = attrs.field(default=True, validator=_is_bool)
    #: Whether what other versions of JAX, a compiler or a kernel measured is used: it may no longer be the fastest.
    other_versions: bool = attrs.field(default=False, validator=_is_bool)


def _default_policy() -> AutotunePolicy:
    mode = os.environ.get("EJKERNEL_AUTOTUNE") or "off"
    if mode not in MODES:
        warnings.warn(f"EJKERNEL_AUTOTUNE takes {', '.join(MODES)}; got {mode!r}, taken for off", stacklevel=2)
        mode = "off"
    return AutotunePolicy(mode)


#: What holds where nothing else was said: as EJKERNEL_AUTOTUNE says, read when the core is imported.
DEFAULT_POLICY = _default_policy()


@attrs.frozen
class Overlay:
    """A snapshot of some configurations by key; equal where the contents are."""

    digest: str
    records: Mapping[Any, tuple[Record, ...]] = attrs.field(eq=False, repr=False)

    def find(self, key: Key, candidate: Candidate) -> Record | None:
        """The record for this kernel: what a store is asked by ``recall``."""
        records = self.records.get(key, ())
        record = fitting(records, candidate)
        for other in records if record is None else ():
            if other.backend in (None, candidate.backend):
                raise RecordError(f"it has {other.cfg!r:.80} for the call, no configuration of {candidate.kernel.name}")
        return record


@attrs.frozen
class Scope:
    """All that is entered, the innermost overlay first."""

    overlays: tuple[Overlay, ...] = ()
    policy: AutotunePolicy = DEFAULT_POLICY
    #: The policies that answer instead of the registry's own, and the state in which they are.
    policies: tuple[tuple[str, Any], ...] | None = attrs.field(default=None, eq=False, repr=False)
    #: Who hears of every invocation that a choice is made for, and of the plugins that it is made among.
    listeners: tuple[Callable[[Invocation, Any], None], ...] = attrs.field(default=(), eq=False, repr=False)
    #: What tells this chain of policies, and these listeners, from others.
    state: str = ""
    #: False for a question, as ``plan`` and ``explain`` are: a policy that measures says what it would do.
    may_measure: bool = True
    #: The content as a text; "" for nothing.
    digest: str = attrs.field(init=False, repr=False)

    @digest.default
    def _content(self) -> str:
        content = [[overlay.digest for overlay in self.overlays], self.policy, self.state]
        return "" if content == [[], DEFAULT_POLICY, ""] else short_hash(content)


#: Nothing entered.
NOTHING = Scope()

_current: ContextVar[Scope] = ContextVar("ejkernel_scope", default=NOTHING)
#: The scopes that were left for it, the last one last.
_outer: ContextVar[tuple[Scope, ...]] = ContextVar("ejkernel_outer_scopes", default=())
#: The digest of the scope, for JAX: a part of every jit key. JAX keeps it for a thread, not for a task, so it is not
#: that of the current scope where another task of this thread entered one.
jit_key = jax.make_user_context("")

current = _current.get


def overlay_cache(cache: Any) -> contextlib.AbstractContextManager[None]:
    """Use these configurations before all others: a ``ConfigCache``, any store, or a mapping from keys.

    What the cache holds now is what counts; a later change is seen when it is entered again.

    >>> with overlay_cache({"some key": 128}):
    ...     [overlay.records["some key"][0].cfg for overlay in current().overlays]
    [128]
    """
    overlay = _overlay(cache)
    return entered(lambda scope: attrs.evolve(scope, overlays=(overlay, *scope.overlays)))


def policy_override(*unnamed: Any, **fields: Any) -> contextlib.AbstractContextManager[None]:
    """Change fields of the ``AutotunePolicy``; ``autotune=True`` is ``mode="on_miss"``, and False ``mode="off"``.

    >>> with policy_override(autotune=True, budget_s=5):
    ...     current().policy
    AutotunePolicy(mode='on_miss', budget_s=5, wait=True, other_versions=False)
    """
    _check_names(unnamed, fields)
    if "autotune" in fields:
        autotune = fields.pop("autotune")
        _check_bool("autotune", autotune)
        fields["mode"] = "on_miss" if autotune else "off"
    attrs.evolve(AutotunePolicy(), **fields)  # what is wrong with them is told here, where they are written
    return entered(lambda scope: attrs.evolve(scope, policy=attrs.evolve(scope.policy, **fields)))


def _check_names(unnamed: Sequence[Any], fields: Mapping[str, Any]) -> None:
    known = ["autotune", *(field.name for field in attrs.fields(AutotunePolicy))]
    if unnamed:
        raise TypeError(f"policy_override: takes its fields by name, as mode='on_miss'; got {unnamed[0]!r:.60}")
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise TypeError(f"policy_override: has no {name!r}{hint} It has {', '.join(known)}")
    if {"autotune", "mode"} <= fields.keys():
        raise TypeError("policy_override: autotune=True is mode='on_miss'; give one of the two")


class entered(contextlib.AbstractContextManager[None]):  # noqa: N801  # it reads as a function, and may be entered again
    """The current scope, changed, for a ``with`` block; as often as one likes, also within itself."""

    def __init__(self, change: Callable[[Scope], Scope]) -> None:
        self._change = change

    def __enter__(self) -> None:
        scope = self._change(current())
        _outer.set((*_outer.get(), current()))
        _current.set(scope)
        _update_jit_key()

    def __exit__(self, *fault: Any) -> None:
        leave()


def leave() -> None:
    """Back to the scope that held before the one that was entered last."""
    *others, scope = _outer.get()
    _outer.set(tuple(others))
    _current.set(scope)
    _update_jit_key()


def jit_key_of_scope() -> contextlib.AbstractContextManager[Any]:
    """Have JAX's key hold the current scope for a ``with`` block: the thread may be another's afterwards."""
    context: contextlib.AbstractContextManager[Any] = jit_key(current().digest)
    return context


def _update_jit_key() -> None:
    # Entered and never left: leaving would bring back what held when it was entered, and tasks that take turns do not
    # leave their scopes in the order in which they entered them.
    jit_key_of_scope().__enter__()


def _overlay(cache: Any) -> Overlay:
    if not hasattr(cache, "items"):
        raise TypeError(f"overlay_cache: takes a ConfigCache, a store or a mapping; got {type(cache).__name__}")
    records = {key: tuple(map(as_record, _several(value))) for key, value in cache.items()}
    try:
        content = sorted((list(item) for item in records.items()), key=stable_json)
        return Overlay(short_hash(content), records)
    except TypeError as fault:
        raise TypeError(f"overlay_cache: takes keys and configurations that have content; {fault}") from fault


def _several(value: Any) -> tuple[Any, ...]:
    """The records of a store, or the one value of a mapping."""
    return value if isinstance(value, tuple) and all(isinstance(v, Record) for v in value) else (value,)
