"""The relative errors of results, and which are allowed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

#: By dtype, the most that two right computations differ by: the rounding of inputs, of results between two matrix
#: products, and of outputs.
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 1.2e-2, "float16": 2e-3}

#: By dtype of 8 bits: the distance of the largest number and its neighbour, relative to the largest number.
STEPS = {"float8_e4m3fn": 32 / 448, "int8": 1 / 127}


@attrs.frozen
class Error:
    """Two relative distances of one array from another."""

    #: The norm of the difference, relative to the norm of the expected array.
    norm: float
    #: The largest entry of the difference, relative to the largest expected one: it shows a single wrong row.
    worst: float
    #: The worst that rounding to 8 bits makes, where two right computations round to neighbours; 0 for wider results.
    step: float = 0.0

    def is_within(self, tolerance: float) -> bool:
        return self.norm <= tolerance and self.worst <= max(tolerance, self.step)  # False for NaN


def error(result: Any, expected: Any) -> Error:
    """The relative error of a result. Arrays of an accelerator are compared there: copying them to the host is slow."""
    result = result.as_jax() if hasattr(result, "as_jax") else result
    is_there = all(isinstance(x, jax.Array) and x.dtype != np.float64 and _is_elsewhere(x) for x in (result, expected))
    sizes = jax.device_get(_sizes_there(result, expected)) if is_there else _sizes(result, expected, np, np.float64)
    (difference_norm, difference_peak), (norm, peak) = sizes
    step = STEPS.get(str(getattr(result, "dtype", "")), 0.0)
    return Error(_ratio(difference_norm, norm), _ratio(difference_peak, peak), step)


def _is_elsewhere(array: jax.Array) -> bool:
    return all(device.platform != "cpu" for device in array.devices())


def _sizes(result: Any, expected: Any, numbers: Any, dtype: Any) -> list[tuple[Any, Any]]:
    """The norm and the largest entry of the difference, and of what is expected. An infinity has to be the same one."""
    result, expected = (numbers.asarray(array).astype(dtype) for array in (result, expected))
    is_same_infinity = numbers.isinf(expected) & (result == expected)
    result, expected = (numbers.where(is_same_infinity, 0, array) for array in (result, expected))
    pair = (result - expected, expected)
    return [(numbers.sqrt((array * array).sum()), numbers.abs(array).max(initial=0)) for array in pair]


#: In float32: the arrays have no more digits, and the device adds up many short sums.
_sizes_there = jax.jit(partial(_sizes, numbers=jnp, dtype=jnp.float32))


def fault_messages(errors: Mapping[str, Error], tolerance: float) -> Iterator[str]:
    """A sentence for each array out of tolerance."""
    for name, error in errors.items():
        if not error.is_within(tolerance):
            yield f"{name} is off by {error.norm:.1e} (norm), {error.worst:.1e} (worst); {tolerance:.1e} is allowed"


def _ratio(part: Any, whole: Any) -> float:
    return float(part) / float(whole) if whole else float(part)
