"""The proofs that every kernel of an operation has to pass: written once, and run by the tests of each backend.

Kernels are proved on the ``examples()`` of their operation. Each check is a function that raises AssertionError, with a
message that begins with the name of the check. ``KernelProofs`` makes pytest tests of the checks for one kernel, and
``kernel_proofs`` for every kernel of a distribution. ``assert_allclose`` compares two arrays. Only tests import this
package.
"""

from __future__ import annotations

from ._allclose import assert_allclose
from ._checks import accumulation, gradients, refusals, rows, sensitivity, values
from ._configurations import configuration_values, configurations
from ._pairwise import pairwise
from ._programs import PROGRAMS, programs
from ._proofs import KernelProofs, kernel_proofs
from ._transforms import TRANSFORMS, transforms

__all__ = [
    "PROGRAMS",
    "TRANSFORMS",
    "KernelProofs",
    "accumulation",
    "assert_allclose",
    "configuration_values",
    "configurations",
    "gradients",
    "kernel_proofs",
    "pairwise",
    "programs",
    "refusals",
    "rows",
    "sensitivity",
    "transforms",
    "values",
]
