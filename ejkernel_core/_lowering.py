"""A call as JAX sees it: one primitive, which becomes the chosen kernel when JAX lowers it.

No kernel is chosen while JAX traces. The plan is made when JAX lowers the primitive. The shapes are final then: each
device has its shard, and the axes of ``vmap`` are folded. The platform is known, even when it is
another machine's. There is no trace that a measurement could disturb. A kernel is traced with its own shapes, and does
not see how its arguments vary over a mesh.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from ._choice import candidates_for
from ._devices import (
    Target,
    absent_target,
    current_platform,
    explicit_mesh,
    partly_manual_mesh,
    target,
    target_of,
)
from ._errors import NoKernel, NotDifferentiable, PluginError, Unsupported, message
from ._fallback import warn_of_reference
from ._jax_versions import (
    Primitive,
    avals_like,
    is_partitioned,
    lower_with_devices,
    lowering_processes,
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

if TYPE_CHECKING:  # imported when arrays are sharded, which most programs do not need
    from ._partitioning import Partitioning

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
        #: What was raised last where a call was lowered. The compiler, which lowers it on a shard, shows the text of an
        #: exception and drops the exception.
        self.fault: BaseException | None = None


@attrs.frozen
class CallContext:
    """What a call depends on beside its operation and arguments."""

    registry: Plugins = attrs.field(repr=False)
    backend: str | None = None
    cfg: Any = None
    #: The scope where the call is made. When JAX lowers it, another one may be in effect.
    scope: Scope = EMPTY
    dependencies: Dependencies = attrs.field(factory=Dependencies, repr=False)
    #: The processes of the program around the call, where they are known before it is lowered; see ``Invocation``.
    processes: tuple[int, ...] | None = ()


class MappedAxis(NamedTuple):
    """An axis over which ``jax.vmap`` maps a call: these arrays, and all results but ``sums``, have it in front."""

    arrays: frozenset[str]
    #: The gradients that are sums over it.
    sums: frozenset[str] = frozenset()


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
    #: The outermost first. They are merged into one call or a loop where the call is lowered, on the shard of a device:
    #: merging two axes of which one is sharded would move data between devices.
    mapped: tuple[MappedAxis, ...] = ()

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the results: those of a backward operation are the arrays whose gradients they are."""
        wrt = dict(self.options).get("wrt")
        return wrt if isinstance(wrt, tuple) else self.operation.results

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
            self.operation,
            target.processes,
        )

    def plan(self, values: Sequence[Any], target: Target) -> Plan:
        context, inv = self.context, self.invocation(values, target)
        with contextlib.suppress(TypeError):  # an option without content, so there is no key
            context.dependencies.kinds.update((key.op, key.kind) for key in inv.tuning_keys)
        return self.registry.choose(inv, context.backend, context.cfg, context.scope)

    def run(self, plan: Plan, values: Sequence[Any]) -> tuple[Any, ...]:
        inv = plan.invocation.with_arrays(dict(zip(self.arrays, values, strict=True)))
        return plan.kernel.run_backend(inv, plan.choice.cfg)

    def elements(self, values: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """The shapes and dtypes of these arrays without the mapped axes."""
        return without_axes(self.mapped, self.arrays, values)

    def outputs(self, values: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes and dtypes of the results."""
        if not self.mapped:
            return self._outputs(values)
        sizes = [*zip(self.mapped, self.mapped_sizes(values), strict=True)]
        return tuple(
            jax.ShapeDtypeStruct((*(n for axis, n in sizes if name not in axis.sums), *result.shape), result.dtype)
            for name, result in zip(self.results, self._outputs(self.elements(values)), strict=True)
        )

    def mapped_sizes(self, values: Sequence[Any]) -> list[int]:
        """The sizes of the mapped axes, which are smaller on a shard."""
        sizes = []
        for number, axis in enumerate(self.mapped):
            name, value = next(item for item in zip(self.arrays, values, strict=True) if item[0] in axis.arrays)
            sizes.append(value.shape[sum(name in outer.arrays for outer in self.mapped[:number])])
        return sizes

    def _outputs(self, values: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        if self.operation.outputs is not None:
            return tuple(self.operation.outputs(self.arguments(values)))
        return _outputs_of_reference(self, [abstract(value) for value in values])

    def partitioning(self, values: Sequence[Any]) -> Partitioning | None:
        """The rule by which this call may be sharded; None where its operation has none, and nothing is mapped."""
        partition = self.operation.partitioning
        if partition is None and not self.mapped:
            return None
        from ._partitioning import whole_partitioning

        elements, reason = self.elements(values), f"{self.operation.name} does not say how it may be sharded"
        try:
            rule = None if partition is None else partition(self.arguments(elements))
        except Unsupported as refusal:
            rule, reason = None, message(refusal)
        if rule is None:
            results = dict(zip(self.results, self._outputs(elements), strict=True))
            rule = whole_partitioning(dict(zip(self.arrays, elements, strict=True)), results, reason)
        sizes = self.mapped_sizes(values)
        for number, axis in reversed([*enumerate(self.mapped)]):
            rule = rule.with_mapped_axis(f"mapped axis {number}", sizes[number], axis.arrays, axis.sums)
        return rule


def without_axes(axes: Sequence[MappedAxis], names: Sequence[str], values: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of arrays, given with their names, without these mapped axes."""
    return [
        jax.ShapeDtypeStruct(value.shape[sum(name in axis.arrays for axis in axes) :], value.dtype)
        for name, value in zip(names, values, strict=True)
    ]


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
    if request.mapped:
        axis, *inner = request.mapped
        element = attrs.evolve(request, mapped=tuple(inner))
        in_axes = tuple(0 if name in axis.arrays else None for name in request.arrays)
        results = jax.vmap(lambda *values: apply_inline(element, values), in_axes)(*arrays)
        return tuple(r.sum(0) if n in axis.sums else r for n, r in zip(request.results, results, strict=True))
    plan = request.plan(arrays, target_of(arrays))
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
    is_backward = request.results is not request.operation.results
    names = [f"d_{name}" if is_backward else name for name in request.results]
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
    if not avals:
        return [ShapedArray(result.shape, result.dtype) for result in results]
    mesh = explicit_mesh(avals)
    rule = None if mesh is None else request.partitioning(avals)
    if rule is not None:
        from ._sharding import partition_spec, shards_of_types

        specs = [*map(partition_spec, shards_of_types(rule, avals, mesh).specs_of_results)]
    else:
        specs = [PartitionSpec() if r.sharding is None else r.sharding.spec for r in results]
    return avals_like(avals, results, specs)


def _run_eagerly(*arrays: Any, request: Request) -> tuple[Any, ...]:  # only under jax.disable_jit
    avals = [*map(jax.typeof, arrays)]
    mesh = explicit_mesh(avals)
    rule = None if mesh is None else request.partitioning(avals)
    if rule is not None:
        from ._sharding import by_shard_map, shards_of_types

        run = by_shard_map(shards_of_types(rule, avals, mesh), mesh, mesh.explicit_axes, partial(bind, request))
        return tuple(run(*arrays))
    if request.mapped:
        return run_mapped(request, arrays)
    plan = request.plan(arrays, target_of(arrays))
    return execute(request, plan, arrays, request.outputs(arrays))


def _lower(ctx: Any, *operands: Any, request: Request, platform: str | None) -> Any:
    try:
        return _lowered(ctx, operands, request, platform or ctx.module_context.platforms[0])
    except BaseException as fault:
        request.context.dependencies.fault = fault
        raise


def _lowered(ctx: Any, operands: Sequence[Any], request: Request, platform: str) -> Any:
    # Where the call is lowered again, on a shard or without its mapped axes, the processes are no longer known.
    context = attrs.evolve(request.context, processes=request.context.processes or lowering_processes(ctx))
    request = attrs.evolve(request, context=context)
    call_target = target(platform)._replace(processes=context.processes)
    with request.settings.in_effect():
        on_shards = _on_shards(request, ctx, call_target)
    if on_shards is not None:
        return mlir.lower_fun(on_shards, multiple_results=True)(ctx, *operands)
    # A kernel computes on its shard, so its avals have no mesh.
    avals = [ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    run = partial(_run_mapped, request) if request.mapped else _kernel(request, avals, call_target, ctx.avals_out)
    return mlir.lower_fun(run, multiple_results=True)(ctx.replace(avals_in=avals), *operands)


def _kernel(request: Request, avals: Sequence[Any], call_target: Target, declared: Sequence[Any]) -> Callable[..., Any]:
    """The chosen kernel for arrays like these, as a function of the arrays."""
    with request.settings.in_effect():
        plan = request.plan(avals, call_target)
    label = call_label(plan.kernel.name, plan.choice.cfg, plan.kernel.config_type)

    def run(*arrays: Any) -> tuple[Any, ...]:
        with request.settings.in_effect(), unchecked_varying(), jax.named_scope(label):
            return execute(request, plan, arrays, declared)

    return run


# -- sharded arrays outside of shard_map -------------------------------------------------------------------------------


def _on_shards(request: Request, ctx: Any, call_target: Target) -> Callable[..., Any] | None:
    """The function that binds the call on every shard; None where it is lowered as it is."""
    explicit, partly_manual = explicit_mesh(ctx.avals_in), partly_manual_mesh(ctx.avals_in)
    if explicit is None and partly_manual is None and not is_partitioned(ctx.module_context):
        return None
    rule, bind_shard = request.partitioning(ctx.avals_in), partial(bind, request)
    if rule is None:
        return None
    from ._sharding import by_partitioner, by_shard_map, shards_of_types

    if explicit is not None:
        return by_shard_map(shards_of_types(rule, ctx.avals_in, explicit), explicit, explicit.explicit_axes, bind_shard)
    if not has_opaque_kernel(request, ctx.avals_in, call_target):
        return None  # the compiler partitions a kernel in plain JAX by itself, and can cache the program on disk
    if partly_manual is not None:  # the partitioner would end the process, so each device computes the whole call
        return by_shard_map(rule.shards({}, ()), partly_manual, partly_manual.auto_axes, bind_shard)
    return by_partitioner(rule, bind_shard)


def has_opaque_kernel(request: Request, avals: Sequence[Any], target: Target) -> bool:
    """Whether the compiler could not partition a kernel that is able to run the call."""
    inv = request.invocation(request.elements(avals), target)
    kernels, _ = request.registry.kernels(inv.op)
    candidates, _ = candidates_for(inv, kernels, request.context.backend, request.context.cfg)
    return any(candidate.kernel.is_opaque_on(inv.platform) for candidate in candidates)


# -- vmap: one call on a larger batch if the operation has ``fold``, else a loop ---------------------------------------


def _batch(arrays: Sequence[Any], axes: Sequence[int | None], *, request: Request) -> tuple[Sequence[Any], list[int]]:
    leading = [
        array if axis is None else jnp.moveaxis(array, axis, 0) for array, axis in zip(arrays, axes, strict=True)
    ]
    mapped = frozenset(name for name, axis in zip(request.arrays, axes, strict=True) if axis is not None)
    results = bind(attrs.evolve(request, mapped=(MappedAxis(mapped), *request.mapped)), leading)
    return results, [0] * len(results)


def _run_mapped(request: Request, *arrays: Any) -> tuple[Any, ...]:
    with request.settings.in_effect():
        return run_mapped(request, arrays)


def run_mapped(request: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a mapped call, by calls without its innermost mapped axis."""
    return _by_folding(request, arrays) or _by_loop(request, arrays)


def _by_folding(request: Request, arrays: Sequence[Any]) -> tuple[Any, ...] | None:
    *outer, axis = request.mapped
    fold = request.operation.fold
    if fold is None:
        return None
    folded_call: list[Any] = []
    size = request.mapped_sizes(arrays)[-1]

    def fold_arrays(*values: Any) -> list[Any]:
        folded = fold(request.arguments(values), axis.arrays, size, axis.sums)
        if folded is None:
            return []
        folded_request, folded_arrays = make_request(request.context, request.operation, folded[0])
        folded_call[:] = folded_request, folded[1]
        return folded_arrays

    if not jax.eval_shape(fold_arrays, *without_axes(outer, request.arrays, arrays)):
        return None
    folded_request, unfold = folded_call
    for outer_axis in reversed(outer):
        fold_arrays = jax.vmap(
            fold_arrays,
            tuple(0 if name in outer_axis.arrays else None for name in request.arrays),
            [0 if name in outer_axis.arrays else None for name in folded_request.arrays],
        )
        over_results = tuple(None if name in outer_axis.sums else 0 for name in request.results)
        if any(place is not None for place in over_results):  # else all results are sums over this axis
            unfold = jax.vmap(unfold, (over_results,), over_results)
    folded_arrays = fold_arrays(*arrays)
    results = bind(attrs.evolve(folded_request, mapped=tuple(outer)), folded_arrays)
    return tuple(unfold(results))


def _by_loop(request: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    *outer, axis = request.mapped
    element = attrs.evolve(request, mapped=tuple(outer))
    is_mapped = [name in axis.arrays for name in request.arrays]
    is_sum = [name in axis.sums for name in request.results]

    def depth(name: str) -> int:
        """The number of axes in front of this one."""
        return sum(name in outer_axis.arrays for outer_axis in outer)

    slices = [jnp.moveaxis(a, depth(n), 0) for n, a, m in zip(request.arrays, arrays, is_mapped, strict=True) if m]

    def step(totals: Sequence[Any], slices_at_index: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        mapped_arrays = iter(slices_at_index)
        results = bind(element, [next(mapped_arrays) if m else a for a, m in zip(arrays, is_mapped, strict=True)])
        parts = [result for result, is_total in zip(results, is_sum, strict=True) if is_total]
        sums = [total + part for total, part in zip(totals, parts, strict=True)]
        return sums, [result for result, is_total in zip(results, is_sum, strict=True) if not is_total]

    outputs = request.outputs(arrays)
    zeros = [
        jnp.zeros(out.shape, jnp.promote_types(out.dtype, jnp.float32))
        for out, is_total in zip(outputs, is_sum, strict=True)
        if is_total
    ]
    totals, stacked = (iter(values) for values in jax.lax.scan(step, zeros, slices))
    return tuple(
        next(totals).astype(out.dtype)
        if is_total
        else jnp.moveaxis(next(stacked), 0, sum(name not in outer_axis.sums for outer_axis in outer))
        for name, out, is_total in zip(request.results, outputs, is_sum, strict=True)
    )


for _primitive in CALLS:
    _primitive.multiple_results = True
    _primitive.def_impl(_run_eagerly)
    _primitive.def_abstract_eval(_abstract_eval)
    batching.primitive_batchers[_primitive] = _batch
    # A function that is lowered for several platforms gets a plan for each. Any other platform has the last rule.
    for _platform in ("cpu", "cuda", "rocm", "tpu"):
        mlir.register_lowering(_primitive, partial(_lower, platform=_platform), platform=_platform)
    mlir.register_lowering(_primitive, partial(_lower, platform=None))
