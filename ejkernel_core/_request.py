"""What a call asks for, all but its arrays: the static half of an invocation."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ._devices import Target
from ._invocation import Invocation
from ._keys import abstract, content
from ._operation import Arguments, Operation
from ._plan import Plan
from ._plugins import Plugins
from ._scopes import NOTHING, Scope
from ._settings import Settings


@attrs.frozen(eq=False)
class Kinds:
    """What a compiled function has chosen by: operations, and the kinds of keys. Itself alone is equal to it, so that
    what JAX keeps for one function does not serve another.
    """

    seen: set[tuple[str, str]] = attrs.field(factory=set)


@attrs.frozen
class Terms:
    """What a call is made on, beside its arguments."""

    registry: Plugins = attrs.field(repr=False)
    backend: str | None = None
    cfg: Any = None
    #: Taken where the call is written: when JAX lowers it, another scope may hold.
    scope: Scope = NOTHING
    #: The arguments that are cut over several devices, and how.
    sharding: tuple[tuple[str, str], ...] = ()
    kinds: Kinds = attrs.field(factory=Kinds, repr=False)


@attrs.frozen
class Request:
    """Hashable, so that JAX can keep it in a jaxpr and compare it."""

    terms: Terms
    operation: Operation = attrs.field(repr=lambda operation: operation.name)
    #: The arrays that are given, in the order in which they travel.
    arrays: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    #: The content of the options and of the explicit cfg: what tells apart values that Python takes for equal.
    content: tuple[Any, ...] = attrs.field(repr=False)
    #: What holds where the call is traced: the kernel is traced under it, too.
    settings: Settings = attrs.field(factory=Settings.here, repr=False)

    @property
    def registry(self) -> Plugins:
        return self.terms.registry

    def arguments(self, values: Sequence[Any]) -> Arguments:
        """Every parameter by name, with these arrays; an array that was not given is None."""
        absent = dict.fromkeys(self.operation.arrays)
        return {**absent, **dict(self.options), **dict(zip(self.arrays, values, strict=True))}

    def invocation(self, values: Sequence[Any], target: Target) -> Invocation:
        """The abstract invocation of arrays like these."""
        arguments = self.arguments([abstract(value) for value in values])
        return Invocation(
            self.operation.name,
            arguments,
            target.platform,
            target.device_kind,
            target.compute_capability,
            self.terms.sharding,
            self.operation,
        )

    def plan(self, values: Sequence[Any], target: Target) -> Plan:
        terms, inv = self.terms, self.invocation(values, target)
        with contextlib.suppress(TypeError):  # nothing is remembered by an option that has no content
            terms.kinds.seen.update((key.op, key.kind) for key in inv.tuning_keys)
        return self.registry.choose(inv, terms.backend, terms.cfg, terms.scope)

    def run(self, plan: Plan, values: Sequence[Any]) -> tuple[Any, ...]:
        return plan.run(plan.invocation.with_arrays(dict(zip(self.arrays, values, strict=True))))


def request(terms: Terms, operation: Operation, arguments: Mapping[str, Any]) -> tuple[Request, list[Any]]:
    """Part prepared arguments into what is asked and the arrays it is asked of."""
    given = tuple(name for name in operation.arrays if arguments[name] is not None)
    options = tuple((name, value) for name, value in arguments.items() if name not in operation.arrays)
    static = (*(content(value) for _, value in options), content(terms.cfg))
    return Request(terms, operation, given, options, static), [arguments[name] for name in given]
