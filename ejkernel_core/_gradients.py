"""The derivative of a call: its backward operation, or its reference differentiated by JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ._devices import current_platform, target
from ._errors import NotDifferentiable
from ._jax_versions import sharded_like, vary_alike
from ._primitive import bind
from ._request import Request, request


def apply(asked: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a call, differentiable as far as anything installed makes it."""
    arrays = vary_alike(arrays)
    if asked.terms.backend == asked.operation.reference:
        return _reference(asked, arrays)
    if asked.operation.backward is None and not _has_reference(asked):
        return bind(asked, arrays)
    return tuple(_differentiable(asked)(*arrays))


def _has_reference(asked: Request) -> bool:
    return asked.operation.reference in asked.registry.backends(asked.operation.name)


def _reference(asked: Request, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The reference is plain JAX, so it is not hidden in a primitive: every mode of differentiation goes through."""
    plan = asked.plan(arrays, target(current_platform(arrays)))
    return asked.run(plan, arrays)


def _differentiable(asked: Request) -> Any:
    @jax.custom_vjp
    def call(*arrays: Any) -> tuple[Any, ...]:
        return bind(asked, arrays)

    def forward(*primals: Any) -> tuple[Any, Any]:
        arrays = [primal.value for primal in primals]
        wanted = {
            name: primal.value
            for name, primal in zip(asked.arrays, primals, strict=True)
            if primal.perturbed and jnp.issubdtype(primal.value.dtype, jnp.inexact)
        }
        _refuse_others(asked, wanted)
        # Through ``call``, not ``bind``: what is computed here is differentiated again for a second derivative.
        results = call(*arrays)
        return results, (arrays, tuple(results), wanted)

    def backward(saved: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        arrays, results, wanted = saved
        moving = [None if isinstance(ct, SymbolicZero) else ct for ct in cotangents]
        if not wanted or all(ct is None for ct in moving):
            return (None,) * len(arrays)
        # JAX gave the dict back in the order of its keys. In that of the arguments it has the key that tuning stored.
        wanted = {name: wanted[name] for name in asked.arrays if name in wanted}
        gradients = _gradients(asked, arrays, results, moving, wanted)
        typed = {name: sharded_like(gradient, wanted[name]) for name, gradient in gradients.items()}
        return tuple(typed.get(name) for name in asked.arrays)

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


def _refuse_others(asked: Request, wanted: Mapping[str, Any]) -> None:
    others = [name for name in wanted if name not in asked.operation.differentiable]
    if others:
        raise NotDifferentiable(f"{asked.operation.name!r} has no gradient for {', '.join(others)}")


def _gradients(
    asked: Request, arrays: Sequence[Any], results: Sequence[Any], cotangents: Sequence[Any], wanted: Mapping[str, Any]
) -> dict[str, Any]:
    if asked.operation.backward is None:
        return _reference_gradients(asked, arrays, results, cotangents, wanted)
    backward, values = backward_request(asked, arrays, results, cotangents, tuple(wanted))
    return dict(zip(wanted, apply(backward, values), strict=True))


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
    # What was asked for explicitly is obeyed in the backward too, where it has such a backend, or takes such a cfg.
    backend = asked.terms.backend if asked.terms.backend in registry.backends(operation.backward) else None
    types = tuple(kernel.config_type for kernel in registry.kernels(operation.backward)[0] if kernel.config_type)
    cfg = asked.terms.cfg if isinstance(asked.terms.cfg, types) else None
    terms = attrs.evolve(asked.terms, backend=backend, cfg=cfg)
    return request(terms, registry.operation(operation.backward), arguments)


def _reference_gradients(
    asked: Request, arrays: Sequence[Any], results: Sequence[Any], cotangents: Sequence[Any], wanted: Mapping[str, Any]
) -> dict[str, Any]:
    terms = attrs.evolve(asked.terms, backend=asked.operation.reference, cfg=None)
    plain, _ = request(terms, asked.operation, asked.arguments(arrays))

    def run(moving: Mapping[str, Any]) -> tuple[Any, ...]:
        return apply(plain, [moving.get(name, array) for name, array in zip(asked.arrays, arrays, strict=True)])

    _, pull_back = jax.vjp(run, dict(wanted))
    full = [jnp.zeros_like(result) if ct is None else ct for ct, result in zip(cotangents, results, strict=True)]
    (gradients,) = pull_back(tuple(full))
    return dict(gradients)
