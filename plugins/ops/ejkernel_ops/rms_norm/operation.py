"""The operations ``rms_norm``, ``rms_norm_bwd`` with its gradients, and ``rms_norm_quantized``, which has none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from ejkernel_core import Axes, Cost, Example, Operation
from ejkernel_ops.arrays import accept, check_floats
from ejkernel_ops.options import finite

from .axes import FORMATS, QUANTIZED, QUANTIZED_SIGNATURE, SIGNATURE, axes

Arguments = dict[str, Any]
Restore = Callable[[tuple[Any, ...]], Any]

DIFFERENTIABLE = ("x", "weight", "bias", "residual")
_LAST_AXIS = "the last axis is normalized: jnp.moveaxis moves another one there"
#: What other libraries call the arguments, for the error of an unknown argument.
OTHER_NAMES = {
    **dict.fromkeys(("input", "inputs", "hidden_states"), "x"),
    **dict.fromkeys(("scale", "gamma", "w"), "weight"),
    **dict.fromkeys(("beta", "offset", "shift"), "bias"),
    **dict.fromkeys(("eps", "variance_epsilon"), "epsilon"),
    **dict.fromkeys(("axis", "reduction_axes", "normalized_shape"), _LAST_AXIS),
    **dict.fromkeys(("implementation", "impl", "platform"), "backend"),
}


def operations(name: str, centered: bool) -> tuple[Operation, Operation, Operation]:
    """A normalization, its backward and its quantized form. ``centered``: the mean of each row is subtracted first."""
    forward_axes = axes(*(("mean", "rstd") if centered else ("rstd",)))
    backward_axes = forward_axes.backward()

    def examples(kind: str) -> Iterable[Example]:
        from . import examples

        return getattr(examples, kind)(name)  # type: ignore[no-any-return]

    forward = Operation(
        name=name,
        signature=SIGNATURE,
        axes=forward_axes,
        differentiable=DIFFERENTIABLE,
        prepare=prepare,
        validate=accept,
        backward=f"{name}_bwd",
        tuning_key=partial(bucket, forward_axes),
        cost=forward_cost,
        examples=partial(examples, "examples"),
        other_names=OTHER_NAMES,
    )
    backward = forward.gradients(tuning_key=partial(bucket, backward_axes), cost=backward_cost)
    quantized = Operation(
        name=f"{name}_quantized",
        signature=QUANTIZED_SIGNATURE,
        axes=QUANTIZED,
        differentiable=(),
        prepare=prepare_quantized,
        validate=accept,
        tuning_key=partial(bucket, QUANTIZED),
        cost=quantized_cost,
        examples=partial(examples, "quantized_examples"),
        other_names=OTHER_NAMES,
    )
    return forward, backward, quantized


# -- checks ----------------------------------------------------------------------------------------------------------


def prepare(arguments: Arguments) -> tuple[Arguments, Restore]:
    """Check the arguments. The caller gets the result, and the sum if there is a residual."""
    for name in DIFFERENTIABLE:
        if arguments[name] is not None:
            check_floats(name, arguments[name])
    dtype = arguments["x"].dtype
    options = {name: finite(name, arguments[name], dtype) for name in ("epsilon", "weight_offset")}
    if options["epsilon"] < 0:
        raise ValueError(f"epsilon: must be at least 0; got {options['epsilon']}")
    if options["weight_offset"] and arguments["weight"] is None:
        raise ValueError("weight_offset: needs a weight, which the call does not have")
    count = 1 if arguments["residual"] is None else 2
    return {**arguments, **options}, lambda results: results[0] if count == 1 else tuple(results[:count])


def prepare_quantized(arguments: Arguments) -> tuple[Arguments, Restore]:
    """Check the arguments. The caller gets the values and the scales, and the sum if there is a residual."""
    if arguments["quantize"] not in FORMATS:
        raise ValueError(f"quantize: takes one of {', '.join(FORMATS)}; got {arguments['quantize']!r}")
    canonical, _ = prepare(arguments)
    count = 2 if arguments["residual"] is None else 3
    return canonical, lambda results: tuple(results[:count])


# -- tuning and cost -------------------------------------------------------------------------------------------------


def bucket(op_axes: Axes, arguments: Mapping[str, Any]) -> Arguments:
    """The key that calls with the same tuning records share: the number of rows is rounded up to a power of two, and
    of the options only whether there is an offset matters.

    >>> import jax
    >>> x = jax.ShapeDtypeStruct((3, 1000, 64), "float32")
    >>> bucket(axes("rstd"), {"x": x, "epsilon": 1e-6, "weight_offset": 1.0})
    {'x': ShapeDtypeStruct(shape=(4096, 64), dtype=float32), 'weight_offset': True}
    """
    rounded = op_axes.bucket(arguments)
    relevant = {name: value for name, value in rounded.items() if name != "epsilon"}
    return {**relevant, "weight_offset": bool(arguments["weight_offset"])}


def forward_cost(arguments: Mapping[str, Any]) -> Cost:
    """Every array once; the sum is written only where there is a residual."""
    x, residual = arguments["x"], arguments["residual"]
    arrays = [arguments[name] for name in DIFFERENTIABLE]
    outputs = [x, *([] if residual is None else [residual])]
    return Cost(4.0 * x.size, _bytes([*arrays, *outputs]) + 4.0 * _rows(x))


def backward_cost(arguments: Mapping[str, Any]) -> Cost:
    """The sum, the cotangents and the statistics are read; the gradients are written."""
    names = ("weight", "sum", "rstd", "mean", "d_out", "d_sum")
    arrays = [arguments.get(name) for name in names]
    return Cost(10.0 * arguments["x"].size, _bytes([*arrays, *(arguments[name] for name in arguments["wrt"])]))


def quantized_cost(arguments: Mapping[str, Any]) -> Cost:
    """Every array once, and one byte for each value."""
    x, residual = arguments["x"], arguments["residual"]
    arrays = [*(arguments[name] for name in DIFFERENTIABLE), residual]
    block = FORMATS[arguments["quantize"]][2] or x.shape[-1]
    return Cost(6.0 * x.size, _bytes(arrays) + x.size + 4.0 * _rows(x) * -(-x.shape[-1] // block))


def _bytes(arrays: Iterable[Any]) -> float:
    return float(sum(array.size * array.dtype.itemsize for array in arrays if array is not None))


def _rows(x: Any) -> int:
    return math.prod(x.shape[:-1])


forward, backward, quantized = operations("rms_norm", centered=False)
