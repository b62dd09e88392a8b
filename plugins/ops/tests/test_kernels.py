from __future__ import annotations

from collections.abc import Sequence

from ejkernel_testing import Case, KernelProofs


class TestReference(KernelProofs):
    """The reference against itself in float64: what there is to prove is its rounding, and JAX's transformations.

    ``test_reference`` proves what it computes, over the grid.
    """

    kernel = "flash_attention.reference"

    def cases(self) -> Sequence[Case]:
        return [case for case in super().cases() if not case.name.startswith("grid") and not case.variations]
