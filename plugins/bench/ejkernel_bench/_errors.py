"""How far results are from what they should be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

#: What two right computations of attention may differ by, by the name of the dtype: the rounding of what goes in, of
#: what is kept between the two matrix products, and of what comes out.
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 1.2e-2, "float16": 2e-3}


@attrs.frozen
class Error:
    """The distance of one array from another, two ways, both relative."""

    #: Of the whole: the norm of the difference by the norm of what is right.
    norm: float
    #: Of the worst entry, by the largest one that is right: a single row gone wrong shows here.
    worst: float

    def within(self, tolerance: float) -> bool:
        return self.norm <= tolerance and self.worst <= tolerance  # False for NaN


def error(given: Any, right: Any) -> Error:
    """The relative error of ``given``. What lies on an accelerator is compared there: the way to the host is long."""
    there = all(isinstance(x, jax.Array) and x.dtype != np.float64 and _elsewhere(x) for x in (given, right))
    sizes = jax.device_get(_sizes_there(given, right)) if there else _sizes(given, right, np, np.float64)
    (difference, most), (whole, peak) = sizes
    return Error(_ratio(difference, whole), _ratio(most, peak))


def _elsewhere(array: jax.Array) -> bool:
    return all(device.platform != "cpu" for device in array.devices())


def _sizes(given: Any, right: Any, numbers: Any, dtype: Any) -> list[tuple[Any, Any]]:
    """The norm and the largest entry of the difference, and of what is right."""
    given, right = (numbers.asarray(array).astype(dtype) for array in (given, right))
    both = (given - right, right)
    return [(numbers.sqrt((array * array).sum()), numbers.abs(array).max(initial=0)) for array in both]


#: In float32: what is compared has no more digits, and a sum is made of many short ones there.
_sizes_there = jax.jit(partial(_sizes, numbers=jnp, dtype=jnp.float32))


def faults(errors: Mapping[str, Error], tolerance: float) -> Iterator[str]:
    """A sentence for each array out of tolerance."""
    for name, found in errors.items():
        if not found.within(tolerance):
            yield f"{name} is off by {found.norm:.1e} (norm), {found.worst:.1e} (worst); {tolerance:.1e} is allowed"


def _ratio(part: Any, whole: Any) -> float:
    return float(part / whole) if whole else float(part)
