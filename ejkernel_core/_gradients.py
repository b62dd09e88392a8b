"""The derivative of a call.

A call's tangents are a primitive of their own, linear in the tangents of its arguments. JAX transposes it, and that is
the backward operation; or the reference, transposed by JAX, where the operation has none. Which arrays are
differentiated is a parameter of the primitive, so it is a part of the program and of every key JAX makes of it. Nothing
of it may be kept aside: calls of one kind share one jitted function, and a program may differentiate each of them in
other arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad, batching, mlir

from ._devices import current_platform, target
from ._errors import NotDifferentiable
from ._jax_versions import Primitive, sharded_like, vary_alike
from ._kernel import LoadedKernel
from ._primitive import CALLS, bind
from ._request import Request, request

tangent_call = Primitive("ejkernel_tangents")
tangent_call.multiple_results = True


def apply(asked: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a call, differentiable as far as anything installed makes it."""
    arrays = vary_alike(arrays)
    if asked.terms.backend == asked.operation.reference:
        return inlined(asked, arrays)
    return bind(asked, arrays)


def _has_reference(asked: Request) -> bool:
    return asked.operation.reference in asked.registry.backends(asked.operation.name)


def inlined(asked: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """A kernel of plain JAX, as the reference is, is not hidden in a primitive: JAX differentiates it in every mode."""
    plan = asked.plan(arrays, target(current_platform(arrays)))
    return tuple(_named(asked, asked.run(plan, arrays)))


# -- forward ---------------------------------------------------------------------------------------------------------


def _differentiated(primitive: Any, primals: Sequence[Any], tangents: Sequence[Any], *, request: Request) -> Any:
    """The results, by the names that ``jax.checkpoint`` may save them by, and their tangents."""
    wrt = tuple(name for name, tangent in zip(request.arrays, tangents, strict=True) if not _is_zero(tangent))
    _check_differentiable(request, wrt)
    # Named before the tangents use them: a saved result is then all that the backward needs of the forward kernel.
    results = _named(request, primitive.bind(*primals, request=request))
    moving = [tangent for tangent in tangents if not _is_zero(tangent)]
    found = iter(tangent_call.bind(*primals, *results, *moving, request=request, wrt=wrt))
    return results, [next(found) if _is_inexact(result) else _no_tangent(result) for result in results]


def _named(asked: Request, results: Sequence[Any]) -> list[Any]:
    names = asked.operation.results
    if len(names) != len(results):  # a backward operation: its results are the gradients that are wanted
        names = tuple(f"d_{name}" for name in dict(asked.options)["wrt"])
    return [checkpoint_name(r, f"{asked.operation.name}.{n}") for r, n in zip(results, names, strict=True)]


def _check_differentiable(asked: Request, wrt: Sequence[str]) -> None:
    operation = asked.operation
    if operation.backward is None and not _has_reference(asked):
        raise NotDifferentiable(
            f"{operation.name!r} has neither a backward operation nor a reference kernel to differentiate"
        )
    others = [name for name in wrt if name not in operation.differentiable]
    if others:
        raise NotDifferentiable(f"{operation.name!r} has no gradient for {', '.join(others)}")


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, ad.Zero) or tangent.dtype == jax.dtypes.float0


def _no_tangent(result: Any) -> Any:
    aval: Any = jax.typeof(result)
    return ad.Zero(aval.to_tangent_aval())


def _is_inexact(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


Parts = tuple[Sequence[Any], Sequence[Any], Sequence[Any]]


def _parts(asked: Request, wrt: Sequence[str], operands: Sequence[Any]) -> Parts:
    """The arrays, the results and the tangents among the operands of ``tangent_call``."""
    first, last = len(asked.arrays), len(operands) - len(wrt)
    return operands[:first], operands[first:last], operands[last:]


def _tangents(*operands: Any, request: Request, wrt: tuple[str, ...]) -> list[Any]:
    """Where they are computed and not transposed, as in ``jax.jvp``: by the reference."""
    if not _has_reference(request):
        raise NotDifferentiable(
            f"{request.operation.name!r}: forward-mode differentiation (jvp, jacfwd, hessian) goes through the "
            "reference kernel, and it has none"
        )
    arrays, _, moving = _parts(request, wrt, operands)
    function, given = _by_reference(request, arrays, wrt)
    _, tangents = jax.jvp(function, (given,), (dict(zip(wrt, moving, strict=True)),))
    return [tangent for tangent in tangents if not _is_zero(tangent)]


def _tangent_types(*avals: Any, request: Request, wrt: tuple[str, ...]) -> list[Any]:
    _, results, _ = _parts(request, wrt, avals)
    return [result.to_tangent_aval() for result in results if _is_inexact(result)]


def _batch(operands: Sequence[Any], axes: Sequence[int | None], *, request: Request, wrt: tuple[str, ...]) -> Any:
    results = jax.vmap(partial(_tangents, request=request, wrt=wrt), axes)(*operands)
    return results, [0] * len(results)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, request: Request, wrt: tuple[str, ...]) -> Any:
    function = partial(_tangents, request=request, wrt=wrt)
    return jax.jvp(function, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


# -- backward --------------------------------------------------------------------------------------------------------


def _transpose(cotangents: Sequence[Any], *operands: Any, request: Request, wrt: tuple[str, ...]) -> list[Any]:
    """The backward operation, for the cotangents that there are and the gradients that are wanted."""
    arrays, results, moving = _parts(request, wrt, operands)
    given = iter(cotangents)
    cts = [next(given) if _is_inexact(result) else None for result in results]
    cts = [None if isinstance(ct, ad.Zero) else ct for ct in cts]
    wanted = tuple(name for name, tangent in zip(wrt, moving, strict=True) if ad.is_undefined_primal(tangent))
    gradients: Mapping[str, Any] = {}
    if wanted and any(ct is not None for ct in cts):
        gradients = _gradients(request, arrays, results, cts, wanted)
    primals = dict(zip(request.arrays, arrays, strict=True))
    typed = {name: sharded_like(gradient, primals[name]) for name, gradient in gradients.items()}
    return [*(None for _ in (*arrays, *results)), *(typed.get(name) for name in wrt)]


def _gradients(
    asked: Request, arrays: Sequence[Any], results: Sequence[Any], cotangents: Sequence[Any], wrt: tuple[str, ...]
) -> Mapping[str, Any]:
    if asked.operation.backward is None:
        return _reference_gradients(asked, arrays, cotangents, wrt)
    backward, values = backward_request(asked, arrays, results, cotangents, wrt)
    return dict(zip(wrt, apply(backward, values), strict=True))


def backward_request(
    asked: Request, arrays: Sequence[Any], results: Sequence[Any], cotangents: Sequence[Any], wrt: tuple[str, ...]
) -> tuple[Request, list[Any]]:
    """The call of the backward operation: ``gradient_signature`` says what it takes."""
    operation, registry = asked.operation, asked.registry
    assert operation.backward is not None
    arguments = {
        **asked.arguments(arrays),
        **dict(zip(operation.results, results, strict=True)),
        **{f"d_{name}": ct for name, ct in zip(operation.results, cotangents, strict=True)},
        "wrt": wrt,
    }
    # An explicit backend or cfg is obeyed in the backward too, where it has such a backend, or takes such a cfg.
    backend = asked.terms.backend if asked.terms.backend in registry.backends(operation.backward) else None
    cfg = _fitting_cfg(asked, registry.kernels(operation.backward)[0])
    terms = attrs.evolve(asked.terms, backend=backend, cfg=cfg)
    backward = registry.operation(operation.backward)
    return request(terms, backward, backward.complete(arguments))


def _fitting_cfg(asked: Request, kernels: Iterable[LoadedKernel]) -> Any:
    """The explicit cfg, if one of these kernels takes it."""
    types = tuple(kernel.config_type for kernel in kernels if kernel.config_type)
    return asked.terms.cfg if isinstance(asked.terms.cfg, types) else None


def _reference_gradients(
    asked: Request, arrays: Sequence[Any], cotangents: Sequence[Any], wrt: tuple[str, ...]
) -> Mapping[str, Any]:
    function, moving = _by_reference(asked, arrays, wrt)
    results, pull_back = jax.vjp(function, moving)
    full = [jnp.zeros_like(result) if ct is None else ct for ct, result in zip(cotangents, results, strict=True)]
    (gradients,) = pull_back(tuple(full))
    return dict(gradients)


def _by_reference(
    asked: Request, arrays: Sequence[Any], wrt: tuple[str, ...]
) -> tuple[Callable[[Mapping[str, Any]], tuple[Any, ...]], dict[str, Any]]:
    """The reference as a function of the arrays ``wrt``, and what these are."""
    operation = asked.operation
    cfg = _fitting_cfg(asked, [asked.registry.kernel(operation.name, operation.reference)])
    terms = attrs.evolve(asked.terms, backend=operation.reference, cfg=cfg)
    plain, _ = request(terms, operation, asked.arguments(arrays))
    given = dict(zip(asked.arrays, arrays, strict=True))

    def run(moving: Mapping[str, Any]) -> tuple[Any, ...]:
        return apply(plain, [*{**given, **moving}.values()])

    return run, {name: given[name] for name in wrt}


for _primitive in CALLS:
    ad.primitive_jvps[_primitive] = partial(_differentiated, _primitive)
tangent_call.def_impl(_tangents)
tangent_call.def_abstract_eval(_tangent_types)
batching.primitive_batchers[tangent_call] = _batch
ad.primitive_jvps[tangent_call] = _jvp
ad.primitive_transposes[tangent_call] = _transpose
mlir.register_lowering(tangent_call, mlir.lower_fun(_tangents, multiple_results=True))
