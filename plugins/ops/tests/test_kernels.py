"""The references against themselves in float64: what there is to prove is their rounding, and JAX's transformations."""

from __future__ import annotations

from ejkernel_testing import kernel_proofs

globals().update(kernel_proofs("ejkernel-ops", quick=0.25, grid=False))
