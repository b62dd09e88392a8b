"""Inputs for the measurement of a call of which only the shapes are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import jax

import ejkernel_core
from ejkernel_core import Axes, Invocation, Operation

from ._forward import forward_results

#: The seed of the random inputs.
SEED = 20

Arrays = dict[str, jax.Array]


def sample_inputs(inv: Invocation, given: Mapping[str, jax.Array] | None = None) -> Arrays:
    """Inputs for an abstract invocation; ``given`` arrays are used as they are. Call it outside of any trace.

    They are the samples of the operation, or else random. A backward operation also gets the
    samples of its forward operation, and the results that the forward has for them: kernels use different ones of these
    results, so that with any others they would have different gradients.
    """
    arguments = {**inv.arguments, **(given or {})}
    key, backward_key = jax.random.split(jax.random.key(SEED))
    forward = (inv.registry or ejkernel_core.registry).forward_of(inv)
    if forward is None:
        return _arrays(_drawn(inv.operation, arguments, key))
    names = forward.signature.parameters
    arguments |= _arrays(_drawn(forward, {name: arguments[name] for name in names}, key))
    if any(_is_abstract(arguments[name]) for name in forward.results):
        call = attrs.evolve(inv, op=forward.name, operation=forward, arguments={n: inv.arguments[n] for n in names})
        arguments |= forward_results(call, _arrays({name: arguments[name] for name in names}))
    return _arrays(_drawn(inv.operation, arguments, backward_key))


def _drawn(operation: Operation | None, arguments: Mapping[str, Any], key: Any) -> dict[str, Any]:
    """The arguments with values for abstract arrays."""
    if not any(map(_is_abstract, arguments.values())):
        return dict(arguments)
    samples = operation.samples if operation else None
    drawn = samples(arguments, key) if samples else Axes.samples(arguments, key)
    return {name: drawn[name] if _is_abstract(value) else value for name, value in arguments.items()}


def _arrays(arguments: Mapping[str, Any]) -> Arrays:
    return {name: value for name, value in arguments.items() if _is_array(value)}


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_abstract(value: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct)
