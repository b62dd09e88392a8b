"""Calls that are described but not run, and their explanations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import jax
from jax.sharding import AbstractMesh

from . import _gradients, _scopes
from ._choice import explained
from ._content import abstract, plain
from ._devices import Target, explicit_mesh, target_of
from ._errors import EjkernelError
from ._form import CallingPlugins, Form, check_backend, parse_call, prepare_call, run_form
from ._lowering import apply, apply_inline, has_opaque_kernel
from ._operation import Restore
from ._plan import Explanation, Plan
from ._request import (
    CallContext,
    Request,
    requests_in,
    standard_promotion,
    used_results,
)

if TYPE_CHECKING:  # imported when arrays are sharded, which most programs do not need
    from ._partitioning import Division


@attrs.frozen(eq=False, repr=False)
class AbstractCall:
    """A call that is not run: its request and the shapes of its prepared arrays on one device, that device, and the
    function that restores the caller's form of the results.
    """

    request: Request
    #: The request of the call on all devices, by which its gradients are computed: those of one may have partial sums.
    undivided: Request
    avals: list[Any]
    target: Target
    restore: Restore
    #: The prepared arrays, if ``abstract_call`` was to include them, none is abstract, and they are on one device.
    values: list[Any] | None = None
    #: How it is divided over several devices.
    division: Division | None = None

    def backward(self) -> tuple[Request, list[Any]]:
        """The request of the backward operation, for all gradients, and the shapes of its arrays."""
        results = self.undivided.outputs(self.avals)
        return self.backward_of(self.avals, results, results)

    def backward_of(
        self, arrays: Sequence[Any], results: Sequence[Any], cotangents: Sequence[Any]
    ) -> tuple[Request, list[Any]]:
        """The same request for these arrays, results and cotangents, and its arrays. Those may be abstract.

        The cotangent of a result that the caller does not get, or that has no gradient, is dropped.
        """
        is_used = used_results(self.restore, self.undivided.outputs(self.avals))
        used_cotangents = [
            ct if used and _gradients.is_inexact(ct) else None for ct, used in zip(cotangents, is_used, strict=True)
        ]
        avals = dict(zip(self.request.arrays, self.avals, strict=True))
        differentiable = self.request.operation.differentiable
        wrt = tuple(name for name, aval in avals.items() if name in differentiable and _gradients.is_inexact(aval))
        backward, values = _gradients.backward_request(self.undivided, arrays, results, used_cotangents, wrt)
        if self.division is None or self.division.shards is None:
            return backward, values
        shards = attrs.evolve(self.division.shards, rule=backward.partitioning(values))
        return backward.with_options(shards.options), values


def abstract_call(
    registry: CallingPlugins,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: str | None = None,
    cfg: Any = None,
    has_values: bool = False,
) -> AbstractCall:
    """A call, described without running it; with ``has_values``, its prepared arrays are included."""
    from ._sharding import as_explicit, is_explicit
    from ._validation import on_other_mesh

    form, arrays, options, context = _parse_abstract(registry, name, args, kwargs, backend, cfg)
    context = attrs.evolve(context, scope=attrs.evolve(context.scope, may_measure=False))
    prepared: list[tuple[Request, Restore]] = []

    def trace(*arrays: Any) -> list[Any]:
        with standard_promotion():
            request, values, restore = prepare_call(form, arrays, options, context)
        prepared.append((request, restore))
        return values

    error = on_other_mesh(name, dict(zip(form.array_names, arrays, strict=True)))
    if error is not None:
        raise error
    shapes = functools.partial(jax.eval_shape, trace)
    avals = run_form(form, shapes, context.dependencies, [*map(as_explicit, arrays)])
    (request, restore), call_target = prepared[0], target_of(arrays)
    division = _division(request, avals, call_target, all(map(is_explicit, arrays)))
    on_shard = request
    if division is not None and division.shards is not None:
        on_shard, has_values = request.with_options(division.shards.options), False
        avals = division.shards.shapes(avals)
    values = trace(*arrays) if has_values and not any(map(_is_abstract, arrays)) else None
    return AbstractCall(on_shard, request, avals, call_target, restore, values, division)


def _division(request: Request, avals: Sequence[Any], call_target: Target, is_explicit: bool) -> Division | None:
    """How the call is divided over the mesh of its arrays; None where they are on one device."""
    mesh = explicit_mesh(avals)
    if mesh is None:
        return None
    from ._partitioning import Division
    from ._sharding import shards_of_types, specs_of_types

    devices = mesh.size
    if not request.may_be_sharded:
        note = f"{request.operation.name} does not say how it may be sharded, so the plan is for the whole arrays"
        return Division(devices, note=note)
    if not (is_explicit or has_opaque_kernel(request, avals, call_target)):
        return Division(devices, note="the compiler partitions the kernel; the plan is for the whole arrays")
    shards = shards_of_types(request.partitioning(avals), avals, mesh)
    return Division(devices, None if shards.is_whole else shards, shards.gathers(specs_of_types(avals)))


def results_and_restore(
    registry: CallingPlugins, name: str, kwargs: dict[str, Any], backend: str | None, by_jax: bool
) -> tuple[tuple[Any, ...], Restore]:
    """All results of a call as its kernel returns them, and the function that restores the caller's form. For use
    while JAX traces. They are differentiated as those of a call; with ``by_jax``, JAX differentiates the kernel itself.
    """
    form, arrays, options, context = _parse_abstract(registry, name, (), kwargs, backend)
    request, values, restore = prepare_call(form, arrays, options, context)
    return (apply_inline if by_jax else apply)(request, values), restore


def _parse_abstract(
    registry: CallingPlugins,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: str | None,
    cfg: Any = None,
) -> tuple[Form, list[Any], list[Any], CallContext]:
    if "validate" in kwargs:
        raise TypeError(f"{name}: validate checks values, but only shapes are used here: pass it to call or omit it")
    if "donate" in kwargs:
        raise TypeError(f"{name}: donate is for a call that runs, and nothing runs here: pass it to call or omit it")
    form, arrays, options = parse_call(registry, name, args, kwargs)
    backend = plain(backend)
    check_backend(registry, name, backend)
    return form, arrays, options, CallContext(registry.core, backend, cfg, _scopes.current_scope())


def _is_abstract(array: Any) -> bool:
    return isinstance(array, (jax.core.Tracer, jax.ShapeDtypeStruct))


def explain_request(request: Request, avals: Sequence[Any], call_target: Target) -> Explanation:
    op = request.operation.name
    try:
        plan = explained(request.plan(avals, call_target), request.registry.kernels(op)[0])
    except EjkernelError as error:
        return Explanation(op, None, str(error), verdicts=getattr(error, "verdicts", ()))
    parts = tuple(explain_request(part, values, call_target) for part, values in _parts(request, plan, avals))
    return Explanation(op, plan, None, verdicts=plan.verdicts, parts=parts)


def _parts(request: Request, plan: Plan, avals: Sequence[Any]) -> list[tuple[Request, list[Any]]]:
    """The calls that the kernel makes, each once, and their arrays. None of a kernel that cannot be traced here."""
    if not plan.kernel.parts:
        return []
    try:
        # On one device, also inside ``jax.set_mesh``: these are the arrays of a shard.
        with request.settings.in_effect(), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            program = jax.make_jaxpr(lambda *arrays: request.run(plan, arrays))(*map(abstract, avals))
    except Exception:  # of any type, and about a call that runs later, if at all
        return []
    parts: dict[Any, tuple[Request, list[Any]]] = {}
    for part, values in requests_in(program.jaxpr):
        elements = part.elements(values)
        parts.setdefault((part.operation.name, part.content, str(elements)), (part, elements))
    return list(parts.values())
