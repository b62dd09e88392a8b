"""The derivative of a call.

The tangents of a call are a primitive of their own, which is linear in the tangents of the arguments. Its transpose is
the backward operation, or JAX's transpose of the reference where there is none. The names of the differentiated arrays
are a parameter of the primitive, so they are a part of the program and of JAX's keys for it. They cannot be stored
elsewhere: calls of one kind share one jitted function, and a program may differentiate each of them with respect to
other arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from ._errors import NotDifferentiable, PluginError, UnknownOperation
from ._jax_versions import Primitive, reshard_like, reshard_without
from ._kernel import LoadedKernel
from ._lowering import apply, result_types, with_checkpoint_names
from ._operation import Operation, gradient_signature, zero_cotangent
from ._request import CALLS, MappedAxis, Request, make_request

tangent_call = Primitive("ejkernel_tangents")
tangent_call.multiple_results = True


def _has_reference(request: Request) -> bool:
    return request.operation.reference in request.registry.backends(request.operation.name)


# -- forward ---------------------------------------------------------------------------------------------------------


def _call_jvp(primitive: Any, primals: Sequence[Any], tangents: Sequence[Any], *, request: Request) -> Any:
    """The rule for the derivative of a call: its results and their tangents."""
    wrt = tuple(name for name, tangent in zip(request.arrays, tangents, strict=True) if not _is_zero(tangent))
    _check_differentiable(request, wrt)
    # The names come before the tangents use the results: if both are saved, the backward runs no forward kernel again.
    saving = request.saving(wrt)
    by_name = saving.by_name(with_checkpoint_names(saving, primitive.bind(*primals, request=saving)))
    results = [by_name[name] for name in request.results]
    residuals = [by_name[name] for name in request.operation.residuals(wrt)]
    nonzero = [tangent for tangent in tangents if not _is_zero(tangent)]
    result_tangents = iter(tangent_call.bind(*primals, *residuals, *nonzero, request=request, wrt=wrt))
    return results, [next(result_tangents) if is_inexact(result) else _no_tangent(result) for result in results]


def _check_differentiable(request: Request, wrt: Sequence[str]) -> None:
    operation = request.operation
    if operation.backward is None and not _has_reference(request):
        raise NotDifferentiable(
            f"{operation.name!r} has neither a backward operation nor a reference kernel to differentiate: register "
            f"'{operation.name}.{operation.reference}', in plain JAX"
        )
    names_without_gradient = [name for name in wrt if name not in operation.differentiable]
    if names_without_gradient:
        raise NotDifferentiable(
            f"{operation.name!r} has no gradient for {', '.join(names_without_gradient)}; jax.lax.stop_gradient makes "
            "a constant of an array"
        )


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, ad.Zero) or tangent.dtype == jax.dtypes.float0


def _no_tangent(result: Any) -> Any:
    aval: Any = jax.typeof(result)
    return ad.Zero(aval.to_tangent_aval())


def is_inexact(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


Parts = tuple[Sequence[Any], Sequence[Any], Sequence[Any]]


def _parts(request: Request, wrt: Sequence[str], operands: Sequence[Any]) -> Parts:
    """The arrays, the residuals and the tangents among the operands of ``tangent_call``."""
    first, last = len(request.arrays), len(operands) - len(wrt)
    return operands[:first], operands[first:last], operands[last:]


def _tangents(*operands: Any, request: Request, wrt: tuple[str, ...]) -> list[Any]:
    """The tangents in forward mode (``jax.jvp``), where they are not transposed: those of the reference."""
    if not _has_reference(request):
        raise NotDifferentiable(
            f"{request.operation.name!r}: forward-mode differentiation (jvp, jacfwd, hessian) goes through the "
            "reference kernel, and it has none"
        )
    arrays, _, argument_tangents = _parts(request, wrt, operands)
    with request.settings.in_effect():
        function, primals = _by_reference(request, arrays, wrt)
        _, tangents = jax.jvp(function, (primals,), (dict(zip(wrt, argument_tangents, strict=True)),))
    return [tangent for tangent in tangents if not _is_zero(tangent)]


def _tangent_types(*avals: Any, request: Request, wrt: tuple[str, ...]) -> list[Any]:
    arrays, _, _ = _parts(request, wrt, avals)
    return [result.to_tangent_aval() for result in result_types(*arrays, request=request) if is_inexact(result)]


def _batch(operands: Sequence[Any], axes: Sequence[int | None], *, request: Request, wrt: tuple[str, ...]) -> Any:
    # JAX refuses to map over a sharded axis where an array that is not mapped is sharded over the same mesh axes.
    mapped = [jax.typeof(o).sharding.spec[axis] for o, axis in zip(operands, axes, strict=True) if axis is not None]
    operands = [
        operand if axis is not None else reshard_without(operand, mapped)
        for operand, axis in zip(operands, axes, strict=True)
    ]
    results = jax.vmap(partial(_tangents, request=request, wrt=wrt), axes)(*operands)
    return results, [0] * len(results)


def _tangents_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, request: Request, wrt: tuple[str, ...]) -> Any:
    function = partial(_tangents, request=request, wrt=wrt)
    return jax.jvp(function, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


# -- backward --------------------------------------------------------------------------------------------------------


def _transpose(cotangents: Sequence[Any], *operands: Any, request: Request, wrt: tuple[str, ...]) -> list[Any]:
    """Run the backward operation, for the cotangents that are not zero and the gradients that JAX needs."""
    arrays, residuals, argument_tangents = _parts(request, wrt, operands)
    cotangent_iterator = iter(cotangents)
    cts = [next(cotangent_iterator) if is_inexact(result) else None for result in request.outputs(arrays)]
    cts = [None if isinstance(ct, ad.Zero) else ct for ct in cts]
    needed = tuple(
        name for name, tangent in zip(wrt, argument_tangents, strict=True) if ad.is_undefined_primal(tangent)
    )
    gradients: Mapping[str, Any] = {}
    if needed and any(ct is not None for ct in cts):
        # A pullback may be called under other settings than those of its forward.
        with request.settings.in_effect():
            by_name = dict(zip(request.operation.residuals(wrt), residuals, strict=True))
            gradients = _gradients(request, arrays, request.completed(by_name, arrays), cts, needed)
    primals = dict(zip(request.arrays, arrays, strict=True))
    resharded = {name: reshard_like(gradient, primals[name]) for name, gradient in gradients.items()}
    return [*(None for _ in (*arrays, *residuals)), *(resharded.get(name) for name in wrt)]


def _gradients(
    request: Request, arrays: Sequence[Any], results: Sequence[Any], cotangents: Sequence[Any], wrt: tuple[str, ...]
) -> Mapping[str, Any]:
    if request.operation.backward is None:
        return _reference_gradients(request, arrays, cotangents, wrt)
    backward, values = backward_request(request, arrays, results, cotangents, wrt)
    return dict(zip(wrt, apply(backward, values), strict=True))


def backward_request(
    request: Request, arrays: Sequence[Any], results: Sequence[Any], cotangents: Sequence[Any], wrt: tuple[str, ...]
) -> tuple[Request, list[Any]]:
    """The request of the backward operation and its arrays; ``gradient_signature`` has its parameters. ``results`` are
    all of a kernel's, and ``cotangents`` those of the request's.
    """
    operation, registry = request.operation, request.registry
    backward = _backward_operation(request)
    arguments = {
        **request.arguments(arrays),
        **dict(zip(operation.results, results, strict=True)),
        **dict.fromkeys(f"d_{name}" for name in operation.results),
        **{f"d_{name}": ct for name, ct in zip(request.results, cotangents, strict=True)},
        "wrt": wrt,
    }
    # An explicit backend or cfg holds for the backward operation too, if it has that backend or takes that cfg.
    backend = request.context.backend if request.context.backend in registry.backends(backward.name) else None
    cfg = _fitting_cfg(request, registry.kernels(backward.name)[0])
    context = attrs.evolve(request.context, backend=backend, cfg=cfg)
    of_backward, values = make_request(context, backward, backward.complete(arguments))
    mapped = tuple(_mapped_axis_of_backward(axis, request, of_backward, wrt) for axis in request.mapped)
    return attrs.evolve(of_backward, mapped=mapped), values


def _mapped_axis_of_backward(axis: MappedAxis, request: Request, backward: Request, wrt: tuple[str, ...]) -> MappedAxis:
    """The mapped axis of a call in its backward. The gradients of arrays that are the same for all its indices are sums
    over it.
    """
    results = [name for name in request.all_results if name not in axis.sums]
    arrays = {*axis.arrays, *results, *(f"d_{name}" for name in results)}
    return MappedAxis(frozenset(arrays & {*backward.arrays}), frozenset(wrt) - axis.arrays)


def _backward_operation(request: Request) -> Operation:
    name = request.operation.backward
    assert name is not None
    try:
        backward = request.registry.operation(name)
    except UnknownOperation as error:
        raise NotDifferentiable(
            f"{request.operation.name!r} has its gradients from the operation {name!r}, which no installed plugin "
            "brings"
        ) from error
    expected = gradient_signature(request.operation.signature, request.operation.results)
    if absent := [parameter for parameter in expected.parameters if parameter not in backward.signature.parameters]:
        raise PluginError(
            f"{name!r} cannot be the backward operation of {request.operation.name!r}: it has no {absent[0]!r} among "
            f"its parameters. See gradient_signature"
        )
    return backward


def _fitting_cfg(request: Request, kernels: Iterable[LoadedKernel]) -> Any:
    """The explicit cfg if one of these kernels takes it, else None."""
    types = tuple(kernel.config_type for kernel in kernels if kernel.config_type)
    return request.context.cfg if isinstance(request.context.cfg, types) else None


def _reference_gradients(
    request: Request, arrays: Sequence[Any], cotangents: Sequence[Any], wrt: tuple[str, ...]
) -> Mapping[str, Any]:
    function, primals = _by_reference(request, arrays, wrt)
    results, vjp = jax.vjp(function, primals)
    full_cotangents = [
        zero_cotangent(result) if ct is None else reshard_like(ct, result)
        for ct, result in zip(cotangents, results, strict=True)
    ]
    (gradients,) = vjp(tuple(full_cotangents))
    return dict(gradients)


def _by_reference(
    request: Request, arrays: Sequence[Any], wrt: tuple[str, ...]
) -> tuple[Callable[[Mapping[str, Any]], tuple[Any, ...]], dict[str, Any]]:
    """The reference as a function of the arrays ``wrt``, and these arrays by name."""
    operation = request.operation
    cfg = _fitting_cfg(request, [request.registry.kernel(operation.name, operation.reference)])
    context = attrs.evolve(request.context, backend=operation.reference, cfg=cfg)
    reference_request, _ = make_request(context, operation, request.arguments(arrays))
    reference_request = attrs.evolve(reference_request, mapped=request.mapped, needed=request.needed)
    by_name = dict(zip(request.arrays, arrays, strict=True))

    def run(differentiated: Mapping[str, Any]) -> tuple[Any, ...]:
        return apply(reference_request, [*{**by_name, **differentiated}.values()])

    return run, {name: by_name[name] for name in wrt}


for _primitive in CALLS:
    ad.primitive_jvps[_primitive] = partial(_call_jvp, _primitive)
tangent_call.def_impl(_tangents)
tangent_call.def_abstract_eval(_tangent_types)
batching.primitive_batchers[tangent_call] = _batch
ad.primitive_jvps[tangent_call] = _tangents_jvp
ad.primitive_transposes[tangent_call] = _transpose
mlir.register_lowering(tangent_call, mlir.lower_fun(_tangents, multiple_results=True))
