"""A call as JAX sees it: one primitive, which becomes the chosen kernel when JAX lowers it.

No kernel is chosen while JAX traces. The plan is made when JAX lowers the primitive. The shapes are final then: each
device has its shard, and the axes of ``vmap`` are folded. The platform is known, even when it is another machine's.
There is no trace that a measurement could disturb. A kernel is traced with its own shapes, and does not see how its
arguments vary over a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

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
from ._devices import Target, explicit_mesh, partly_manual_mesh, target, target_of
from ._errors import NotDifferentiable, PluginError, name_line
from ._fallback import warn_of_reference
from ._jax_versions import (
    avals_like,
    is_partitioned,
    line_of_call,
    lowering_processes,
    narrow_where_dead,
    unchecked_varying,
    vary_alike,
)
from ._labels import call_label
from ._operation import Restore
from ._plan import Plan
from ._request import CALLS, Request, bind, standard_promotion, used_results


def apply(request: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a call, with its derivative."""
    arrays = vary_alike(arrays)
    if request.context.backend == request.operation.reference:
        return apply_inline(request, arrays)
    return bind(request, arrays)


def apply_and_restore(request: Request, arrays: Sequence[Any], restore: Restore) -> Any:
    """What the caller gets of a call, whose kernel computes nothing else."""
    if len(request.results) > 1:
        request = request.needing(used_results(restore, request.outputs(arrays)))
    return restore(request.completed(request.by_name(apply(request, arrays)), arrays))


def apply_inline(request: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a kernel in plain JAX, such as the reference, without the primitive: JAX can differentiate it."""
    operation = request.operation
    arrays = [
        array
        if name in operation.differentiable or not jnp.issubdtype(array.dtype, jnp.inexact)
        else _without_gradient(operation.name, name, array)
        for name, array in zip(request.arrays, arrays, strict=True)
    ]
    return tuple(with_checkpoint_names(request, _run_inline(request, arrays)))


def _run_inline(request: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    avals = [*map(jax.typeof, arrays)]
    if explicit_mesh(avals) is None:
        return _run_plain(request, *arrays)
    outputs = request.outputs(avals)
    if any(out.sharding is not None and any(out.sharding.spec) for out in outputs):  # the operation says how itself
        return _run_plain(request, *arrays)
    from ._divided import Divided

    rule = request.partitioning(avals)
    run = partial(_run_plain, request.with_options(rule.options(rule.sums)))
    return Divided(run, rule, outputs, request.settings)(*arrays)


def _run_plain(request: Request, *arrays: Any) -> tuple[Any, ...]:
    if request.mapped:
        axis, *inner = request.mapped
        element = partial(_run_plain, attrs.evolve(request, mapped=tuple(inner)))
        in_axes = tuple(0 if name in axis.arrays else None for name in request.arrays)
        results = jax.vmap(element, in_axes)(*arrays)
        return tuple(r.sum(0) if n in axis.sums else r for n, r in zip(request.results, results, strict=True))
    plan = request.plan(arrays, target_of(arrays))
    with standard_promotion():
        return request.select(request.run(plan, arrays))


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
    is_backward = request.all_results is not request.operation.results
    names = [f"d_{name}" if is_backward else name for name in request.results]
    return [checkpoint_name(r, f"{request.operation.name}.{n}") for r, n in zip(results, names, strict=True)]


def execute(request: Request, plan: Plan, arrays: Sequence[Any], declared: Sequence[Any]) -> tuple[Any, ...]:
    """Run the plan, and check the results against those that the operation declares. Returns the needed ones, which are
    like ``declared``.
    """
    if request.context.backend is None and request.context.cfg is None:
        warn_of_reference(plan, request.registry)
    results = request.run(plan, arrays)
    # The reference may have to be traced to know the others.
    outputs = declared if request.needed is None else attrs.evolve(request, needed=None).outputs(arrays)
    returned, expected = _types(results), [f"{array.dtype}{list(array.shape)}" for array in outputs]
    names, needed = request.all_results, request.results
    if len(returned) != len(names) or any(
        kind != promised and (kind != _NONE or name in needed)
        for name, kind, promised in zip(names, returned, expected, strict=True)
    ):
        note = "" if _NONE not in returned else f"; of these, {', '.join(needed)} cannot be None in this call"
        raise PluginError(
            f"{plan.kernel.name} ({plan.kernel.provider}) returned ({', '.join(returned)}); "
            f"the operation {request.operation.name!r} promises ({', '.join(expected)}){note}"
        )
    return request.select(results)


_ARRAYS = (jax.Array, np.ndarray, np.generic)
_NONE = "None"


def _types(results: Sequence[Any]) -> list[str]:
    return [
        f"{result.dtype}{list(result.shape)}"
        if isinstance(result, _ARRAYS)
        else (_NONE if result is None else type(result).__name__)
        for result in results
    ]


def result_types(*avals: Any, request: Request) -> list[Any]:
    """The types of the results of a call on arrays of these types."""
    results = request.outputs(avals)
    if not avals:
        return [ShapedArray(result.shape, result.dtype) for result in results]
    mesh = explicit_mesh(avals)
    if mesh is None or not request.may_be_sharded:
        return avals_like(avals, results, [PartitionSpec() if r.sharding is None else r.sharding.spec for r in results])
    from ._sharding import partition_spec, shards_of_types

    shards = shards_of_types(request.partitioning(avals), avals, mesh)
    return avals_like(avals, results, [*map(partition_spec, shards.specs_of_results)])


def _without_dead_results(used: Sequence[bool], params: dict[str, Any]) -> dict[str, Any]:
    return {"request": params["request"].needing(used)}


def _run_eagerly(*arrays: Any, request: Request) -> tuple[Any, ...]:  # only under jax.disable_jit
    on_shards = _on_explicit_shards(request, [*map(jax.typeof, arrays)], partial(_bind_shard, request))
    if on_shards is not None:
        return tuple(on_shards(*arrays))
    if request.mapped:
        return _mapped(request, arrays)
    plan = request.plan(arrays, target_of(arrays))
    return execute(request, plan, arrays, request.outputs(arrays))


def _lower(ctx: Any, *operands: Any, request: Request, platform: str | None) -> Any:
    try:
        return _lowered(ctx, operands, request, platform or ctx.module_context.platforms[0])
    except BaseException as fault:
        name_line(fault, line_of_call())
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


def _run_mapped(request: Request, *arrays: Any) -> tuple[Any, ...]:
    with request.settings.in_effect():
        return _mapped(request, arrays)


def _mapped(request: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    from ._vmap import run_mapped  # imported here, because most programs map no call

    return run_mapped(request, arrays)


def _batch(arrays: Sequence[Any], axes: Sequence[int | None], *, request: Request) -> Any:
    from ._vmap import batch

    return batch(arrays, axes, request=request)


# -- sharded arrays outside of shard_map -------------------------------------------------------------------------------


def _on_shards(request: Request, ctx: Any, call_target: Target) -> Callable[..., Any] | None:
    """The function that binds the call on every shard; None where it is lowered as it is."""
    bind_shard = partial(_bind_shard, request)
    on_explicit_shards = _on_explicit_shards(request, ctx.avals_in, bind_shard)
    if on_explicit_shards is not None:
        return on_explicit_shards
    partly_manual = partly_manual_mesh(ctx.avals_in)
    if not request.may_be_sharded or (partly_manual is None and not is_partitioned(ctx.module_context)):
        return None
    if not has_opaque_kernel(request, ctx.avals_in, call_target):
        return None  # the compiler partitions a kernel in plain JAX by itself, and can cache the program on disk
    from ._sharding import by_partitioner, by_shard_map

    rule = request.partitioning(ctx.avals_in)
    if partly_manual is not None:  # the partitioner would end the process, so each device computes the whole call
        shards, axes = rule.shards({}, ()), partly_manual.auto_axes
        return by_shard_map(shards, partly_manual, axes, bind_shard, request.settings.in_effect)
    return by_partitioner(rule, bind_shard, request.settings.in_effect)


def _bind_shard(request: Request, arrays: Sequence[Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
    return bind(request.with_options(options), arrays)


def _on_explicit_shards(
    request: Request, avals: Sequence[Any], run_shard: Callable[..., Sequence[Any]]
) -> Callable[..., Any] | None:
    """The function that divides a call on arrays of these types over explicit axes; None where there are none."""
    mesh = explicit_mesh(avals)
    if mesh is None or not request.may_be_sharded:
        return None
    from ._sharding import by_shard_map, shards_of_types

    shards = shards_of_types(request.partitioning(avals), avals, mesh)
    return by_shard_map(shards, mesh, mesh.explicit_axes, run_shard, request.settings.in_effect)


def has_opaque_kernel(request: Request, avals: Sequence[Any], target: Target) -> bool:
    """Whether the compiler could not partition a kernel that is able to run the call."""
    inv = request.invocation(request.elements(avals), target)
    kernels, _ = request.registry.kernels(inv.op)
    candidates, _ = candidates_for(inv, kernels, request.context.backend, request.context.cfg)
    return any(candidate.kernel.is_opaque_on(inv.platform) for candidate in candidates)


for _primitive in CALLS:
    _primitive.multiple_results = True
    _primitive.def_impl(_run_eagerly)
    _primitive.def_abstract_eval(result_types)
    batching.primitive_batchers[_primitive] = _batch
    narrow_where_dead(_primitive, _without_dead_results)
    # A function that is lowered for several platforms gets a plan for each. Any other platform has the last rule.
    for _platform in ("cpu", "cuda", "rocm", "tpu"):
        mlir.register_lowering(_primitive, partial(_lower, platform=_platform), platform=_platform)
    mlir.register_lowering(_primitive, partial(_lower, platform=None))
