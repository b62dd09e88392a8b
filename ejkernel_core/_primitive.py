"""A call as JAX sees it: one primitive.

Nothing is chosen while JAX traces. The plan is made when JAX lowers the primitive: the shapes are final then (``vmap``
has folded its axes, ``shard_map`` has cut its shards), the platform is known even when it is not this machine's, and no
tracer is near that a measurement could disturb. A kernel is traced for its own shapes alone and never sees how its
arguments vary over a mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.core import ShapedArray
from jax.interpreters import batching, mlir

from . import _batching
from ._devices import absent, current_platform, target
from ._errors import NoKernel, PluginError, Unsupported
from ._fallback import warn_of_reference
from ._jax_versions import Primitive, avals_like, lower_with_devices, vary_alike
from ._keys import abstract
from ._labels import call_label
from ._plan import Plan
from ._request import Request

kernel_call = Primitive("ejkernel_call")
lower_with_devices(kernel_call)
#: The same, where JAX compiles for a device that is not here and could not say which ones.
absent_call = Primitive("ejkernel_call")
CALLS = (kernel_call, absent_call)


def bind(request: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The results of the best kernel for the request, whatever JAX does with it around here."""
    primitive = kernel_call if absent() is None else absent_call
    return tuple(primitive.bind(*vary_alike(arrays), request=request))


def outputs(request: Request, arrays: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes and dtypes of the results."""
    operation = request.operation
    if operation.outputs is not None:
        return tuple(operation.outputs(request.arguments(arrays)))
    reference = request.registry.kernel(operation.name, operation.reference)
    avals = [abstract(array) for array in arrays]
    invocation = request.invocation(avals, target(current_platform(())))

    try:
        cfg = reference.heuristic_cfg(invocation)
    except Unsupported as refusal:
        raise NoKernel(f"{reference.name}, which says what {operation.name!r} returns, refuses: {refusal}") from refusal

    def run(*values: Any) -> tuple[Any, ...]:
        return reference.run_backend(invocation.with_arrays(dict(zip(request.arrays, values, strict=True))), cfg)

    return tuple(jax.eval_shape(run, *avals))


def execute(request: Request, plan: Plan, arrays: Sequence[Any], promised: Sequence[Any]) -> tuple[Any, ...]:
    """Run the plan and hold the kernel to what the operation promises."""
    if request.terms.backend is None and request.terms.cfg is None:
        warn_of_reference(plan, request.registry)
    results = request.run(plan, arrays)
    given, wanted = _types(results), _types(promised)
    if given != wanted:
        raise PluginError(
            f"{plan.kernel.name} of {plan.kernel.provider} returned ({', '.join(given)}); "
            f"the operation {request.operation.name!r} promises ({', '.join(wanted)})"
        )
    return results


def _types(results: Sequence[Any]) -> list[str]:
    return [
        f"{result.dtype}{list(result.shape)}" if hasattr(result, "dtype") else type(result).__name__
        for result in results
    ]


def _abstract_eval(*avals: Any, request: Request) -> list[Any]:
    results = outputs(request, avals)
    return avals_like(avals[0], results) if avals else [ShapedArray(r.shape, r.dtype) for r in results]


def _run_eagerly(*arrays: Any, request: Request) -> tuple[Any, ...]:  # only under jax.disable_jit
    plan = request.plan(arrays, target(current_platform(arrays)))
    return execute(request, plan, arrays, outputs(request, arrays))


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


def _batch(arrays: Sequence[Any], axes: Sequence[int | None], *, request: Request) -> tuple[Sequence[Any], list[int]]:
    results = _batching.batch(request, arrays, axes, bind)
    return results, [0] * len(results)


for _primitive in CALLS:
    _primitive.multiple_results = True
    _primitive.def_impl(_run_eagerly)
    _primitive.def_abstract_eval(_abstract_eval)
    batching.primitive_batchers[_primitive] = _batch
    # A function lowered for several platforms at once gets a plan for each; any other platform gets the last rule.
    for _platform in ("cpu", "cuda", "rocm", "tpu"):
        mlir.register_lowering(_primitive, partial(_lower, platform=_platform), platform=_platform)
    mlir.register_lowering(_primitive, partial(_lower, platform=None))
