"""A call as JAX sees it: one primitive, which becomes the chosen kernel when JAX lowers it.

No kernel is chosen while JAX traces. The plan is made when JAX lowers the primitive. The shapes are final then, because
``vmap`` has folded its axes, and ``shard_map`` has given each device its shard. The platform is known, even when it is
another machine's. There is no trace that a measurement could disturb. A kernel is traced with its own shapes, and does
not see how its arguments vary over a mesh.
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
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from ._devices import Target, absent_target, current_platform, target
from ._errors import NoKernel, NotDifferentiable, PluginError, Unsupported
from ._fallback import warn_of_reference
from ._jax_versions import (
    Primitive,
    avals_like,
    explicit_spec,
    is_sharded,
    lower_with_devices,
    reshard_leading,
    unchecked_varying,
    vary_alike,
)
from ._kernel import Invocation
from ._keys import abstract, content
from ._labels import call_label
from ._operation import Arguments, Operation
from ._plan import Plan
from ._plugins import Plugins
from ._scopes import EMPTY, Scope

# -- a request: a call without the values of its arrays ----------------------------------------------------------------


class Settings(NamedTuple):
    """The settings of JAX that change what a function computes.

    They belong to a thread, and are in effect where a call is traced. Its kernel is traced when JAX lowers the call,
    which may happen in another thread or with other settings.
    """

    x64: bool
    precision: Any

    @classmethod
    def current(cls) -> Settings:
        """The settings that are in effect now."""
        config: Any = jax.config
        return cls(bool(config.jax_enable_x64), config.jax_default_matmul_precision)

    def in_effect(self) -> contextlib.ExitStack:
        """Put the settings into effect for a ``with`` block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.enable_x64(self.x64))
            stack.enter_context(jax.default_matmul_precision(self.precision))
            stack.enter_context(standard_promotion())
            return stack.pop_all()


def standard_promotion() -> contextlib.AbstractContextManager[None]:
    """Use standard promotion of dtypes for a ``with`` block: a user's strict promotion is not meant for kernels."""
    promotion: contextlib.AbstractContextManager[None] = jax.numpy_dtype_promotion("standard")
    return promotion


class Dependencies:
    """The kinds of keys by which a compiled function has chosen its kernels, with their operations.

    An instance is equal only to itself, so that JAX does not reuse for one function what it cached for another.
    """

    def __init__(self) -> None:
        self.kinds: set[tuple[str, str]] = set()


@attrs.frozen
class CallContext:
    """What a call depends on beside its operation and arguments."""

    registry: Plugins = attrs.field(repr=False)
    backend: str | None = None
    cfg: Any = None
    #: The scope where the call is made. When JAX lowers it, another one may be in effect.
    scope: Scope = EMPTY
    #: The arguments that are sharded over several devices, and how.
    sharding: tuple[tuple[str, str], ...] = ()
    dependencies: Dependencies = attrs.field(factory=Dependencies, repr=False)


@attrs.frozen
class Request:
    """A call without the values of its arrays. It is hashable, so that it can be a parameter of a primitive."""

    context: CallContext
    operation: Operation = attrs.field(repr=lambda operation: operation.name)
    #: The names of the arrays that the call has, in the order of the primitive's operands.
    arrays: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    #: The content of the options and of the explicit cfg, which differs where Python's equality does not.
    content: tuple[Any, ...] = attrs.field(repr=False)
    #: The settings where the call is traced, with which its kernel is traced too.
    settings: Settings = attrs.field(factory=Settings.current, repr=False)

    @property
    def registry(self) -> Plugins:
        return self.context.registry

    def arguments(self, values: Sequence[Any]) -> Arguments:
        """Every parameter by name, with these arrays. An array that the call does not have is None."""
        missing = dict.fromkeys(self.operation.arrays)
        return {**missing, **dict(self.options), **dict(zip(self.arrays, values, strict=True))}

    def invocation(self, values: Sequence[Any], target: Target) -> Invocation:
        """The invocation of this request on abstract arrays like these."""
        return Invocation(
            self.operation.name,
            self.arguments([abstract(value) for value in values]),
            target.platform,
            target.device_kind,
            target.compute_capability,
            self.context.sharding,
            self.operation,
        )

    def plan(self, values: Sequence[Any], target: Target) -> Plan:
        context, inv = self.context, self.invocation(values, target)
        with contextlib.suppress(TypeError):  # an option without content, so there is no key
            context.dependencies.kinds.update((key.op, key.kind) for key in inv.tuning_keys)
        return self.registry.choose(inv, context.backend, context.cfg, context.scope)

    def run(self, plan: Plan, values: Sequence[Any]) -> tuple[Any, ...]:
        inv = plan.invocation.with_arrays(dict(zip(self.arrays, values, strict=True)))
        return plan.kernel.run_backend(inv, plan.choice.cfg)

    def outputs(self, values: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes and dtypes of the results."""
        if self.operation.outputs is not None:
            return tuple(self.operation.outputs(self.arguments(values)))
        return _outputs_of_reference(self, [abstract(value) for value in values])


def make_request(context: CallContext, operation: Operation, arguments: Mapping[str, Any]) -> tuple[Request, list[Any]]:
    """Split prepared arguments into a request and its arrays."""
    names = tuple(name for name in operation.arrays if arguments[name] is not None)
    options = tuple((name, value) for name, value in arguments.items() if name not in operation.arrays)
    static = content((*(value for _, value in options), context.cfg))
    return Request(context, operation, names, options, static), [arguments[name] for name in names]


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
#: The same primitive for JAX compiling for an absent device, where it cannot pass devices to ``_lower``.
absent_device_call = Primitive("ejkernel_call")
CALLS = (kernel_call, absent_device_call)


def bind(request: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The results of the best kernel for the request, by the primitive."""
    primitive = kernel_call if absent_target() is None else absent_device_call
    return tuple(primitive.bind(*vary_alike(arrays), request=request))


def apply(request: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a call, with its derivative."""
    arrays = vary_alike(arrays)
    if request.context.backend == request.operation.reference:
        return apply_inline(request, arrays)
    return bind(request, arrays)


def apply_inline(request: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a kernel in plain JAX, such as the reference, without the primitive: JAX can differentiate it."""
    plan = request.plan(arrays, target(current_platform(arrays)))
    operation = request.operation
    arrays = [
        array
        if name in operation.differentiable or not jnp.issubdtype(array.dtype, jnp.inexact)
        else _without_gradient(operation.name, name, array)
        for name, array in zip(request.arrays, arrays, strict=True)
    ]
    with standard_promotion():
        return tuple(with_checkpoint_names(request, request.run(plan, arrays)))


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _without_gradient(operation: str, name: str, array: Any) -> Any:
    """The array. Its gradient is refused, although JAX could differentiate the kernel."""
    return array


@partial(_without_gradient.defjvp, symbolic_zeros=True)
def _refuse_tangent(operation: str, name: str, primals: Any, tangents: Any) -> Any:
    if isinstance(tangents[0], SymbolicZero):
        return primals[0], tangents[0]
    raise NotDifferentiable(f"{operation!r} has no gradient for {name}")


def with_checkpoint_names(request: Request, results: Sequence[Any]) -> list[Any]:
    """The results, with the names that a policy of ``jax.checkpoint`` may save."""
    names = request.operation.results
    if len(names) != len(results):  # a backward operation: its results are the gradients that ``wrt`` names
        names = tuple(f"d_{name}" for name in dict(request.options)["wrt"])
    return [checkpoint_name(r, f"{request.operation.name}.{n}") for r, n in zip(results, names, strict=True)]


def execute(request: Request, plan: Plan, arrays: Sequence[Any], declared: Sequence[Any]) -> tuple[Any, ...]:
    """Run the plan, and check the results against those that the operation declares."""
    if request.context.backend is None and request.context.cfg is None:
        warn_of_reference(plan, request.registry)
    results = request.run(plan, arrays)
    returned, expected = _types(results), [f"{array.dtype}{list(array.shape)}" for array in declared]
    if returned != expected:
        raise PluginError(
            f"{plan.kernel.name} ({plan.kernel.provider}) returned ({', '.join(returned)}); "
            f"the operation {request.operation.name!r} promises ({', '.join(expected)})"
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


def _lower(ctx: Any, *operands: Any, request: Request, platform: str | None) -> Any:
    # A kernel computes on its shard, so its avals have no mesh.
    avals = [ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    with request.settings.in_effect():
        plan = request.plan(avals, target(platform or ctx.module_context.platforms[0]))
    label = call_label(plan.kernel.name, plan.choice.cfg, plan.kernel.config_type)

    def run(*arrays: Any) -> tuple[Any, ...]:
        with request.settings.in_effect(), unchecked_varying(), jax.named_scope(label):
            return execute(request, plan, arrays, ctx.avals_out)

    return mlir.lower_fun(run, multiple_results=True)(ctx.replace(avals_in=avals), *operands)


# -- vmap: one call on a larger batch if the operation has ``fold``, else a loop ---------------------------------------


def _batch(arrays: Sequence[Any], axes: Sequence[int | None], *, request: Request) -> tuple[Sequence[Any], list[int]]:
    results = _vmap(request, arrays, axes)
    return results, [0] * len(results)


def _vmap(request: Request, arrays: Sequence[Any], axes: Sequence[int | None]) -> tuple[Any, ...]:
    """The results of one call for each index of the mapped axes, stacked along axis 0."""
    leading = [
        array if axis is None else jnp.moveaxis(array, axis, 0) for array, axis in zip(arrays, axes, strict=True)
    ]
    mapped = [axis is not None for axis in axes]
    sharded_array = next(
        (a for a, is_mapped in zip(leading, mapped, strict=True) if is_mapped and explicit_spec(a)[0] is not None), None
    )
    if sharded_array is not None:
        return _vmap_over_devices(request, leading, mapped, sharded_array)
    return _vmap_by_folding(request, leading, mapped) or _vmap_by_loop(request, leading, mapped)


def _vmap_over_devices(
    request: Request, arrays: Sequence[Any], mapped: Sequence[bool], sharded_array: Any
) -> tuple[Any, ...]:
    """Split the mapped axis of all arrays over devices as in ``sharded_array``, because a loop on one device has no
    access to the shards of others.
    """
    mesh, mesh_axes = jax.typeof(sharded_array).sharding.mesh, explicit_spec(sharded_array)[0]
    specs = tuple(PartitionSpec(mesh_axes) if is_mapped else PartitionSpec() for is_mapped in mapped)

    def call_on_part(*parts: Any) -> tuple[Any, ...]:
        return _vmap(request, vary_alike(parts), [0 if is_mapped else None for is_mapped in mapped])

    resharded = [
        reshard_leading(array, mesh, mesh_axes, is_mapped) for array, is_mapped in zip(arrays, mapped, strict=True)
    ]
    names = set(mesh_axes) if isinstance(mesh_axes, tuple) else {mesh_axes}
    run = jax.shard_map(call_on_part, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(mesh_axes), axis_names=names)
    results: tuple[Any, ...] = run(*resharded)
    return results


def _vmap_by_folding(request: Request, arrays: Sequence[Any], mapped: Sequence[bool]) -> tuple[Any, ...] | None:
    # Folding merges axes, and an axis that is sharded cannot be merged without moving data between devices.
    if request.operation.fold is None or any(map(is_sharded, arrays)):
        return None
    names = frozenset(name for name, is_mapped in zip(request.arrays, mapped, strict=True) if is_mapped)
    size = next(array.shape[0] for array, is_mapped in zip(arrays, mapped, strict=True) if is_mapped)
    folded = request.operation.fold(request.arguments(arrays), names, size)
    if folded is None:
        return None
    arguments, unfold = folded
    return tuple(unfold(bind(*make_request(request.context, request.operation, arguments))))


def _vmap_by_loop(request: Request, arrays: Sequence[Any], mapped: Sequence[bool]) -> tuple[Any, ...]:
    def call_at_index(slices: Sequence[Any]) -> tuple[Any, ...]:
        rest = iter(slices)
        return bind(
            request, [next(rest) if is_mapped else array for array, is_mapped in zip(arrays, mapped, strict=True)]
        )

    mapped_arrays = [array for array, is_mapped in zip(arrays, mapped, strict=True) if is_mapped]
    results: tuple[Any, ...] = jax.lax.map(call_at_index, mapped_arrays)
    return results


for _primitive in CALLS:
    _primitive.multiple_results = True
    _primitive.def_impl(_run_eagerly)
    _primitive.def_abstract_eval(_abstract_eval)
    batching.primitive_batchers[_primitive] = _batch
    # A function that is lowered for several platforms gets a plan for each. Any other platform has the last rule.
    for _platform in ("cpu", "cuda", "rocm", "tpu"):
        mlir.register_lowering(_primitive, partial(_lower, platform=_platform), platform=_platform)
    mlir.register_lowering(_primitive, partial(_lower, platform=None))
