"""What a call asks for, all but its arrays: the static half of an invocation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from ._devices import Target
from ._invocation import Invocation
from ._keys import abstract
from ._operation import Arguments, Operation
from ._plan import Plan, make_plan
from ._scopes import NOTHING, Scope

if TYPE_CHECKING:
    from ._registry import Registry


@attrs.frozen
class Terms:
    """What a call is made on, beside its arguments."""

    registry: Registry = attrs.field(repr=False)
    backend: str | None = None
    cfg: Any = None
    #: Taken where the call is written: when JAX lowers it, another scope may hold.
    scope: Scope = NOTHING
    #: The arguments that are cut over several devices, and how.
    sharding: tuple[tuple[str, str], ...] = ()


@attrs.frozen
class Request:
    """Hashable, so that JAX can keep it in a jaxpr and compare it."""

    terms: Terms
    operation: Operation = attrs.field(repr=lambda operation: operation.name)
    #: The arrays that are given, in the order in which they travel.
    arrays: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    #: The kinds of the options and of the explicit cfg: see ``kind_of``.
    kinds: tuple[Any, ...] = attrs.field(repr=False)

    @property
    def registry(self) -> Registry:
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
            self.registry,
        )

    def plan(self, values: Sequence[Any], target: Target) -> Plan:
        terms = self.terms
        return make_plan(self.registry, self.invocation(values, target), terms.backend, terms.cfg, terms.scope)

    def run(self, plan: Plan, values: Sequence[Any]) -> tuple[Any, ...]:
        return plan.run(plan.invocation.with_arrays(dict(zip(self.arrays, values, strict=True))))


def kind_of(value: Any) -> Any:
    """What tells values apart that are equal and not the same: 1, 1.0 and True, 0.0 and -0.0, inside of others too."""
    kind = type(value)
    if kind is tuple:
        return (kind, *map(kind_of, value))
    if kind is complex or (kind is float and value == 0.0):
        return kind, repr(value)
    if attrs.has(kind):
        return (kind, *(kind_of(getattr(value, field.name)) for field in attrs.fields(kind)))
    if dataclasses.is_dataclass(kind):
        return (kind, *(kind_of(getattr(value, field.name)) for field in dataclasses.fields(kind)))
    return kind


def request(terms: Terms, operation: Operation, arguments: Mapping[str, Any]) -> tuple[Request, list[Any]]:
    """Part prepared arguments into what is asked and the arrays it is asked of."""
    given = tuple(name for name in operation.arrays if arguments[name] is not None)
    options = tuple((name, value) for name, value in arguments.items() if name not in operation.arrays)
    kinds = (*(kind_of(value) for _, value in options), kind_of(terms.cfg))
    return Request(terms, operation, given, options, kinds), [arguments[name] for name in given]
