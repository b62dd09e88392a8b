"""A call as JAX sees it: one primitive, from what a call asks for to its compiled kernel.

Nothing is chosen while JAX traces. The plan is made when JAX lowers the primitive: the shapes are final then (``vmap``
has folded its axes, ``shard_map`` has given each device its shard), the platform is known even when it is not this
machine's, and no tracer is near that a measurement could disturb. A kernel is traced for its own shapes alone and never
sees how its arguments vary over a mesh.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from ._devices import Target, absent, current_platform, target
from ._errors import NoKernel, PluginError, Unsupported
from ._fallback import warn_of_reference
from ._jax_versions import (
    Primitive,
    avals_like,
    explicit_spec,
    is_sharded,
    leading_over,
    lower_with_devices,
    vary_alike,
)
from ._kernel import Invocation
from ._keys import abstract, content
from ._labels import call_label
from ._operation import Arguments, Operation
from ._plan import Plan
from ._plugins import Plugins
from ._scopes import NOTHING, Scope

# -- what a call asks for, all but its arrays --------------------------------------------------------------------------


class Settings(NamedTuple):
    """JAX's settings that change what a function computes.

    They are a thread's own and hold while JAX traces. A kernel is traced when JAX lowers the call, which may be
    elsewhere.
    """

    x64: bool
    precision: Any

    @classmethod
    def here(cls) -> Settings:
        """As they are now."""
        config: Any = jax.config
        return cls(bool(config.jax_enable_x64), config.jax_default_matmul_precision)

    def entered(self) -> contextlib.ExitStack:
        """Have them hold, for a ``with`` block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.enable_x64(self.x64))
            stack.enter_context(jax.default_matmul_precision(self.precision))
            stack.enter_context(standard_promotion())
            return stack.pop_all()


def standard_promotion() -> contextlib.AbstractContextManager[None]:
    """Who wants strict promotion wants it of his own code, not of that of operations and kernels."""
    promotion: contextlib.AbstractContextManager[None] = jax.numpy_dtype_promotion("standard")
    return promotion


class Kinds:
    """What a compiled function has chosen by: operations, and the kinds of keys. Itself alone is equal to it, so that
    what JAX keeps for one function does not serve another.
    """

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()


@attrs.frozen
class Terms:
    """What a call is made on, beside its arguments."""

    registry: Plugins = attrs.field(repr=False)
    backend: str | None = None
    cfg: Any = None
    #: Taken where the call is written: when JAX lowers it, another scope may hold.
    scope: Scope = NOTHING
    #: The arguments that are sharded over several devices, and how.
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
        missing = dict.fromkeys(self.operation.arrays)
        return {**missing, **dict(self.options), **dict(zip(self.arrays, values, strict=True))}

    def invocation(self, values: Sequence[Any], target: Target) -> Invocation:
        """The abstract invocation of arrays like these."""
        return Invocation(
            self.operation.name,
            self.arguments([abstract(value) for value in values]),
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

    def outputs(self, values: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes and dtypes of the results."""
        if self.operation.outputs is not None:
            return tuple(self.operation.outputs(self.arguments(values)))
        return _outputs_of_reference(self, [abstract(value) for value in values])


def as_request(terms: Terms, operation: Operation, arguments: Mapping[str, Any]) -> tuple[Request, list[Any]]:
    """Part prepared arguments into a request and the arrays that it is made of."""
    given = tuple(name for name in operation.arrays if arguments[name] is not None)
    options = tuple((name, value) for name, value in arguments.items() if name not in operation.arrays)
    static = content((*(value for _, value in options), terms.cfg))
    return Request(terms, operation, given, options, static), [arguments[name] for name in given]


def _outputs_of_reference(request: Request, avals: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    operation = request.operation
    if operation.reference not in request.registry.backends(operation.name):
        raise PluginError(
            f"{operation.name}: nothing says what it returns. Give the Operation axes or outputs, or a kernel "
            f"{operation.name}.{operation.reference}"
        )
    reference = request.registry.kernel(operation.name, operation.reference)
    invocation = request.invocation(avals, target(current_platform(())))
    try:
        cfg = reference.heuristic_cfg(invocation)
    except Unsupported as refusal:
        raise NoKernel(f"{reference.name}, which says what {operation.name!r} returns, refuses: {refusal}") from refusal

    def run(*values: Any) -> tuple[Any, ...]:
        return reference.run_backend(invocation.with_arrays(dict(zip(request.arrays, values, strict=True))), cfg)

    return tuple(jax.eval_shape(run, *avals))


# -- the primitive -----------------------------------------------------------------------------------------------------

kernel_call = Primitive("ejkernel_call")
lower_with_devices(kernel_call)
#: The same, where JAX compiles for a device that is not here and could not say which ones.
absent_call = Primitive("ejkernel_call")
CALLS = (kernel_call, absent_call)


def bind(request: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The results of the best kernel for the request, whatever JAX does with it around here."""
    primitive = kernel_call if absent() is None else absent_call
    return tuple(primitive.bind(*vary_alike(arrays), request=request))


def apply(request: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a call, differentiable as far as anything installed makes it."""
    arrays = vary_alike(arrays)
    if request.terms.backend == request.operation.reference:
        return inlined(request, arrays)
    return bind(request, arrays)


def inlined(request: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """A kernel of plain JAX, as the reference is, is not hidden in a primitive: JAX differentiates it in every mode."""
    plan = request.plan(arrays, target(current_platform(arrays)))
    with standard_promotion():
        return tuple(named(request, request.run(plan, arrays)))


def named(request: Request, results: Sequence[Any]) -> list[Any]:
    """The results, by the names that ``jax.checkpoint`` may save them by."""
    names = request.operation.results
    if len(names) != len(results):  # a backward operation: its results are the gradients that are wanted
        names = tuple(f"d_{name}" for name in dict(request.options)["wrt"])
    return [checkpoint_name(r, f"{request.operation.name}.{n}") for r, n in zip(results, names, strict=True)]


def execute(request: Request, plan: Plan, arrays: Sequence[Any], promised: Sequence[Any]) -> tuple[Any, ...]:
    """Run the plan and hold the kernel to what the operation promises."""
    if request.terms.backend is None and request.terms.cfg is None:
        warn_of_reference(plan, request.registry)
    results = request.run(plan, arrays)
    returned, wanted = _types(results), [f"{array.dtype}{list(array.shape)}" for array in promised]
    if returned != wanted:
        raise PluginError(
            f"{plan.kernel.name} ({plan.kernel.provider}) returned ({', '.join(returned)}); "
            f"the operation {request.operation.name!r} promises ({', '.join(wanted)})"
        )
    return results


_ARRAYS = (jax.Array, np.ndarray, np.generic)


def _types(results: Sequence[Any]) -> list[str]:
    return [
        f"{result.dtype}{list(result.shape)}" if isinstance(result, _ARRAYS) else type(result).__name__
        for result in results
    ]


def _abstract_eval(*avals: Any, request: Request) -> list[Any]:
    results = request.outputs(avals)
    return avals_like(avals[0], results) if avals else [ShapedArray(r.shape, r.dtype) for r in results]


def _run_eagerly(*arrays: Any, request: Request) -> tuple[Any, ...]:  # only under jax.disable_jit
    plan = request.plan(arrays, target(current_platform(arrays)))
    return execute(request, plan, arrays, request.outputs(arrays))


def _lower(context: Any, *operands: Any, request: Request, platform: str | None) -> Any:
    # A kernel computes on its shard: it has no business with the mesh, so its avals carry no trace of one.
    avals = [ShapedArray(aval.shape, aval.dtype) for aval in context.avals_in]
    with request.settings.entered():
        plan = request.plan(avals, target(platform or context.module_context.platforms[0]))
    label = call_label(plan.kernel.name, plan.choice.cfg, plan.kernel.config_type)

    def run(*arrays: Any) -> tuple[Any, ...]:
        with request.settings.entered(), jax.named_scope(label):
            return execute(request, plan, arrays, context.avals_out)

    return mlir.lower_fun(run, multiple_results=True)(context.replace(avals_in=avals), *operands)


# -- vmap: one call on a larger batch where the operation says how, else a loop ----------------------------------------


def _batch(arrays: Sequence[Any], axes: Sequence[int | None], *, request: Request) -> tuple[Sequence[Any], list[int]]:
    results = _batched(request, arrays, axes)
    return results, [0] * len(results)


def _batched(request: Request, arrays: Sequence[Any], axes: Sequence[int | None]) -> tuple[Any, ...]:
    """The results of one call for each index of the mapped axes, stacked along axis 0."""
    leading = [
        array if axis is None else jnp.moveaxis(array, axis, 0) for array, axis in zip(arrays, axes, strict=True)
    ]
    mapped = [axis is not None for axis in axes]
    sharded = next((a for a, yes in zip(leading, mapped, strict=True) if yes and explicit_spec(a)[0] is not None), None)
    if sharded is not None:
        return _batched_over_devices(request, leading, mapped, sharded)
    return _folded(request, leading, mapped) or _looped(request, leading, mapped)


def _batched_over_devices(
    request: Request, arrays: Sequence[Any], mapped: Sequence[bool], sharded: Any
) -> tuple[Any, ...]:
    """Every device takes its own part of the mapped axis, which is that of ``sharded`` for all: a loop could not walk
    over what others have.
    """
    mesh, over = jax.typeof(sharded).sharding.mesh, explicit_spec(sharded)[0]
    specs = tuple(PartitionSpec(over) if yes else PartitionSpec() for yes in mapped)

    def own(*parts: Any) -> tuple[Any, ...]:
        return _batched(request, vary_alike(parts), [0 if yes else None for yes in mapped])

    placed = [leading_over(array, mesh, over, yes) for array, yes in zip(arrays, mapped, strict=True)]
    names = set(over) if isinstance(over, tuple) else {over}
    run = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(over), axis_names=names)
    results: tuple[Any, ...] = run(*placed)
    return results


def _folded(request: Request, arrays: Sequence[Any], mapped: Sequence[bool]) -> tuple[Any, ...] | None:
    # Folding merges axes, and an axis that is sharded cannot be merged without moving data between devices.
    if request.operation.fold is None or any(map(is_sharded, arrays)):
        return None
    names = frozenset(name for name, yes in zip(request.arrays, mapped, strict=True) if yes)
    size = next(array.shape[0] for array, yes in zip(arrays, mapped, strict=True) if yes)
    folded = request.operation.fold(request.arguments(arrays), names, size)
    if folded is None:
        return None
    arguments, unfold = folded
    return tuple(unfold(bind(*as_request(request.terms, request.operation, arguments))))


def _looped(request: Request, arrays: Sequence[Any], mapped: Sequence[bool]) -> tuple[Any, ...]:
    def one(slices: Sequence[Any]) -> tuple[Any, ...]:
        rest = iter(slices)
        return bind(request, [next(rest) if yes else array for array, yes in zip(arrays, mapped, strict=True)])

    moving = [array for array, yes in zip(arrays, mapped, strict=True) if yes]
    results: tuple[Any, ...] = jax.lax.map(one, moving)
    return results


for _primitive in CALLS:
    _primitive.multiple_results = True
    _primitive.def_impl(_run_eagerly)
    _primitive.def_abstract_eval(_abstract_eval)
    batching.primitive_batchers[_primitive] = _batch
    # A function lowered for several platforms at once gets a plan for each; any other platform gets the last rule.
    for _platform in ("cpu", "cuda", "rocm", "tpu"):
        mlir.register_lowering(_primitive, partial(_lower, platform=_platform), platform=_platform)
    mlir.register_lowering(_primitive, partial(_lower, platform=None))
