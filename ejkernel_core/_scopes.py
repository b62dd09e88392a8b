"""Scopes: overlays of configurations, and a tuning policy, for the length of a ``with`` block.

A scope is an immutable value in a ``ContextVar``, so every thread and task has its own. A hash of its content is in
JAX's jit key: JAX traces a function again under a scope with other content, and only then.
"""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar, Token
from typing import Any, Literal, Protocol, TypeVar, overload

import attrs
import jax

from ._content import plain, read_only, short_hash, stable_json
from ._display import brief, suggestion
from ._invocation import Invocation
from ._kernel import Candidate, find_record
from ._keys import Key
from ._records import Record, as_record

Class = TypeVar("Class", bound=Any)
Mode = Literal["off", "on_miss", "error_on_miss"]
MODES: tuple[Mode, ...] = ("off", "on_miss", "error_on_miss")


def _is_mode(policy: Any, field: Any, value: Any) -> None:
    if not (isinstance(value, str) and value in MODES):
        *others, last = MODES
        raise ValueError(f"{field.name}: takes {', '.join(others)} or {last}; got {brief(value)}")


def _is_seconds(policy: Any, field: Any, value: Any) -> None:
    message = f"{field.name}: takes a finite number of seconds above 0; got {brief(value)}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(message)
    if not 0 < float(value) < math.inf:
        raise ValueError(message)


def _is_bool(policy: Any, field: Any, value: Any) -> None:
    _check_bool(field.name, value)


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: takes True or False; got {brief(value)}")


def _check_names(title: str, names: Sequence[str], fields: Iterable[str]) -> None:
    for name in fields:
        if name not in names:
            about_mode = "; mode='on_miss' measures, mode='off' does not." if "autotune" in name else "."
            hint = suggestion(name, names) or about_mode
            raise TypeError(f"{title}: has no {name!r}{hint} It has {', '.join(names)}")


def _with_names_checked(kind: type[Class]) -> type[Class]:
    """The class, whose constructor raises our error for an unknown field."""
    initialize = kind.__init__

    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, **fields: Any) -> None:  # noqa: N807
        _check_names(kind.__name__, [field.name for field in attrs.fields(kind)], fields)
        initialize(self, *args, **fields)

    kind.__init__ = __init__
    return kind


@_with_names_checked
@attrs.frozen
class AutotunePolicy:
    """What to do for a call for which no store has a configuration.

    "off" takes the heuristic, "on_miss" measures, "error_on_miss" raises ``NoConfig``.
    """

    mode: Mode = attrs.field(default="off", converter=plain, validator=_is_mode)
    #: The longest time for one measurement, including compilation.
    budget_s: float = attrs.field(default=60.0, validator=_is_seconds)
    #: Whether a thread waits for another one that measures the same call. If not, it takes the heuristic.
    wait: bool = attrs.field(default=True, validator=_is_bool)
    #: Whether to use records of other versions of JAX, a compiler or a kernel, which may no longer be the fastest.
    other_versions: bool = attrs.field(default=False, validator=_is_bool)


def _default_policy() -> AutotunePolicy:
    value = os.environ.get("EJKERNEL_AUTOTUNE") or "off"
    for mode in MODES:
        if mode == value:
            return AutotunePolicy(mode)
    warnings.warn(f"EJKERNEL_AUTOTUNE takes {', '.join(MODES)}; got {value!r}, taken for off", stacklevel=2)
    return AutotunePolicy()


#: The policy outside of any scope: EJKERNEL_AUTOTUNE has its mode, which is read when the core is imported.
DEFAULT_POLICY = _default_policy()


@attrs.frozen
class Overlay:
    """A snapshot of configurations by key. Overlays with equal content are equal."""

    digest: str
    records: Mapping[Any, tuple[Record, ...]] = attrs.field(eq=False, repr=False, converter=read_only)

    def find(self, key: Key, candidate: Candidate) -> Record | None:
        """The record for the candidate's kernel, or None; ``recall`` calls this method of stores."""
        return find_record(self.records.get(key, ()), candidate)

    def backends_by_hand(self, key: Key) -> tuple[str, ...]:
        """The backends of the records that were not measured. A measured one may be of another installation."""
        records = self.records.get(key, ())
        return tuple(record.backend for record in records if record.backend is not None and record.provenance is None)


@attrs.frozen
class Scope:
    """The overlays, the innermost first, and the policy that are in effect."""

    overlays: tuple[Overlay, ...] = ()
    policy: AutotunePolicy = DEFAULT_POLICY
    #: Policies to ask instead of the registry's own ones, by name.
    policies: tuple[tuple[str, Any], ...] | None = attrs.field(default=None, eq=False, repr=False)
    #: Called before every choice, with the invocation and the registry.
    listeners: tuple[Callable[[Invocation, Any], None], ...] = attrs.field(default=(), eq=False, repr=False)
    #: Identifies these policies and listeners in the scope's content.
    state: str = ""
    #: False in ``plan`` and ``explain``: the tuner then says what it would do, and measures nothing.
    may_measure: bool = True
    #: A hash of the content; "" for an empty scope.
    digest: str = attrs.field(init=False, repr=False)

    @digest.default
    def _content(self) -> str:
        content = [[overlay.digest for overlay in self.overlays], self.policy, self.state]
        return "" if content == [[], DEFAULT_POLICY, ""] else short_hash(content)


#: The scope outside of any ``with`` block.
EMPTY = Scope()

_current: ContextVar[Scope] = ContextVar("ejkernel_scope", default=EMPTY)
#: The blocks that the current scope is inside of, the innermost last.
_blocks: ContextVar[tuple[_Block, ...]] = ContextVar("ejkernel_blocks", default=())
#: Has no value of its own: the tokens of its changes tell whether a block was entered in this context.
_entered: ContextVar[None] = ContextVar("ejkernel_entered")
#: The digest of the scope, as a part of JAX's jit key. JAX keeps it for each thread, not for each task, so it may be
#: the digest of another scope, which another task of the thread has entered.
jit_key = jax.make_user_context("")

#: The overlays and the policy that are in effect here.
current_scope = _current.get


class HasItems(Protocol):
    """A ``ConfigCache``, a store, or a mapping from keys to configurations."""

    def items(self) -> Iterable[tuple[Any, Any]]:
        """The keys, each with its record, records or configuration."""
        ...


def overlay_cache(cache: HasItems) -> contextlib.AbstractContextManager[None]:
    """Prefer these configurations to all others: a ``ConfigCache``, any store, or a mapping from keys.

    The overlay is a snapshot: later changes of the cache count when it is entered again. A record without a provenance
    for a backend that the operation does not have raises ``UnknownBackend`` in the call; a measured one is left out,
    because it may be of another installation.

    >>> with overlay_cache({"some key": 128}):
    ...     [overlay.records["some key"][0].cfg for overlay in current_scope().overlays]
    [128]
    """
    overlay = _overlay(cache)
    return ScopeChange(lambda scope: attrs.evolve(scope, overlays=(overlay, *scope.overlays)))


@overload
def policy_override(
    *, autotune: bool = ..., budget_s: float = ..., wait: bool = ..., other_versions: bool = ...
) -> contextlib.AbstractContextManager[None]: ...


@overload
def policy_override(
    *, mode: Mode, budget_s: float = ..., wait: bool = ..., other_versions: bool = ...
) -> contextlib.AbstractContextManager[None]: ...


def policy_override(*positional: Any, **fields: Any) -> contextlib.AbstractContextManager[None]:
    """Change fields of the ``AutotunePolicy``; ``autotune=True`` is ``mode="on_miss"``, and False ``mode="off"``.

    >>> with policy_override(autotune=True, budget_s=5):
    ...     current_scope().policy
    AutotunePolicy(mode='on_miss', budget_s=5, wait=True, other_versions=False)
    """
    _check_override(positional, fields)
    if "autotune" in fields:
        autotune = fields.pop("autotune")
        _check_bool("autotune", autotune)
        fields["mode"] = "on_miss" if autotune else "off"
    attrs.evolve(AutotunePolicy(), **fields)  # raises for wrong fields here, before the block is entered
    return ScopeChange(lambda scope: attrs.evolve(scope, policy=attrs.evolve(scope.policy, **fields)))


def _check_override(positional: Sequence[Any], fields: Mapping[str, Any]) -> None:
    if positional:
        raise TypeError(f"policy_override: takes its fields by name, as mode='on_miss'; got {brief(positional[0])}")
    _check_names("policy_override", ["autotune", *(field.name for field in attrs.fields(AutotunePolicy))], fields)
    if {"autotune", "mode"} <= fields.keys():
        raise TypeError("policy_override: autotune=True is mode='on_miss'; give one of the two")


@attrs.frozen(eq=False)
class _Block:
    """A ``with`` block that was entered, the scope around it, and the context."""

    change: ScopeChange
    outer: Scope
    token: Token[None]

    def is_of_this_context(self) -> bool:
        """Whether it was entered here. A task, or a thread with a copy of the context, is inside of the block without
        having entered it. The token can be used once.
        """
        try:
            _entered.reset(self.token)
        except (ValueError, RuntimeError):  # of another context, or used by the one that entered the block
            return False
        return True


class ScopeChange(contextlib.AbstractContextManager[None]):
    """Changes the current scope for a ``with`` block. It can be entered any number of times, also within itself.

    A block may be left in another thread or task than it was entered in: a generator is closed, or collected, there.
    Nothing changes then, because the scope there is another one.
    """

    def __init__(self, change: Callable[[Scope], Scope]) -> None:
        self._change = change

    def __enter__(self) -> None:
        scope = self._change(current_scope())
        _blocks.set((*_blocks.get(), _Block(self, current_scope(), _entered.set(None))))
        _current.set(scope)
        _update_jit_key()

    def __exit__(self, *fault: Any) -> None:
        blocks = _blocks.get()
        place = next((i for i in reversed(range(len(blocks))) if blocks[i].change is self), None)
        if place is None or not blocks[place].is_of_this_context():
            return
        # The blocks inside of it are left later, if generators are closed in another order.
        scope, rest = blocks[place].outer, blocks[:place]
        for block in blocks[place + 1 :]:
            rest = (*rest, attrs.evolve(block, outer=scope))
            scope = block.change._change(scope)
        _blocks.set(rest)
        _current.set(scope)
        _update_jit_key()


def jit_key_of_scope() -> contextlib.AbstractContextManager[Any]:
    """Put the current scope into JAX's jit key for a ``with`` block. Another task may run in the thread afterwards."""
    context: contextlib.AbstractContextManager[Any] = jit_key(current_scope().digest)
    return context


def _update_jit_key() -> None:
    # It is never exited: exiting restores the value from before, and the tasks of a thread do not leave their scopes in
    # the reverse order of entering them.
    jit_key_of_scope().__enter__()


def _overlay(cache: Any) -> Overlay:
    if not hasattr(cache, "items"):
        raise TypeError(f"overlay_cache: takes a ConfigCache, a store or a mapping; got {type(cache).__name__}")
    records = {key: tuple(map(as_record, _records_of(value))) for key, value in cache.items()}
    try:
        content = sorted((list(item) for item in records.items()), key=stable_json)
        return Overlay(short_hash(content), records)
    except TypeError as fault:
        raise TypeError(f"overlay_cache: takes keys and configurations that have content; {fault}") from fault


def _records_of(value: Any) -> tuple[Any, ...]:
    """The records that a store has under a key, or the one value of a mapping."""
    return value if isinstance(value, tuple) and all(isinstance(v, Record) for v in value) else (value,)
