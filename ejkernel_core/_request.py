"""What a call asks for, all but its arrays: the static half of an invocation."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jax

from ._devices import Target
from ._kernel import Invocation
from ._keys import content
from ._operation import Arguments, Operation
from ._plan import Plan
from ._plugins import Plugins
from ._scopes import NOTHING, Scope


@attrs.frozen
class Settings:
    """JAX's settings that change what a function computes.

    They are a thread's own and hold while JAX traces. A kernel is traced when JAX lowers the call, which may be
    elsewhere.
    """

    x64: bool
    precision: Any
    promotion: Any

    @classmethod
    def here(cls) -> Settings:
        """As they are now."""
        config: Any = jax.config
        promotion = config.jax_numpy_dtype_promotion
        precision = config.jax_default_matmul_precision
        return cls(bool(config.jax_enable_x64), precision, getattr(promotion, "value", promotion))

    def entered(self) -> contextlib.ExitStack:
        """Have them hold, for a ``with`` block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.enable_x64(self.x64))
            stack.enter_context(jax.default_matmul_precision(self.precision))
            stack.enter_context(jax.numpy_dtype_promotion(self.promotion))
            return stack.pop_all()


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
        arguments = self.arguments([jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values])
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
        inv = plan.invocation.with_arrays(dict(zip(self.arrays, values, strict=True)))
        return plan.kernel.run_backend(inv, plan.choice.cfg)


def request(terms: Terms, operation: Operation, arguments: Mapping[str, Any]) -> tuple[Request, list[Any]]:
    """Part prepared arguments into what is asked and the arrays it is asked of."""
    given = tuple(name for name in operation.arrays if arguments[name] is not None)
    options = tuple((name, value) for name, value in arguments.items() if name not in operation.arrays)
    static = content((*(value for _, value in options), terms.cfg))
    return Request(terms, operation, given, options, static), [arguments[name] for name in given]
