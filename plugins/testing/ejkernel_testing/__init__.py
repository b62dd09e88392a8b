"""The proofs that every kernel of an operation has to pass: written once, here, and run by each backend's tests.

An operation's ``cases()`` are what a kernel is proved on; the checks say what is proved; ``KernelProofs`` makes pytest
tests of both. Each check is a plain function that raises AssertionError with its own name in front;
``assert_allclose`` compares any two arrays so. Nothing but tests imports this package.
"""

from __future__ import annotations

from ._allclose import assert_allclose
from ._case import Case
from ._checks import accumulation, configurations, gradients, refusals, rows, sensitivity, values
from ._pairwise import pairwise
from ._programs import PROGRAMS, programs
from ._proofs import KernelProofs
from ._transforms import TRANSFORMS, transforms

__all__ = [
    "PROGRAMS",
    "TRANSFORMS",
    "Case",
    "KernelProofs",
    "accumulation",
    "assert_allclose",
    "configurations",
    "gradients",
    "pairwise",
    "programs",
    "refusals",
    "rows",
    "sensitivity",
    "transforms",
    "values",
]
