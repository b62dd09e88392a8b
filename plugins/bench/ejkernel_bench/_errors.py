"""How far results are from what they should be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
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
    """The relative error of ``given``."""
    given, right = np.asarray(given, np.float64), np.asarray(right, np.float64)
    difference = given - right
    whole, peak = np.linalg.norm(right), np.max(np.abs(right), initial=0)
    return Error(_ratio(np.linalg.norm(difference), whole), _ratio(np.max(np.abs(difference), initial=0), peak))


def faults(errors: Mapping[str, Error], tolerance: float) -> Iterator[str]:
    """A sentence for each array out of tolerance."""
    for name, found in errors.items():
        if not found.within(tolerance):
            yield f"{name} is off by {found.norm:.1e} (norm), {found.worst:.1e} (worst); {tolerance:.1e} is allowed"


def _ratio(part: Any, whole: Any) -> float:
    return float(part / whole) if whole else float(part)
