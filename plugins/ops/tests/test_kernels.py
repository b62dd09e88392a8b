"""The references against themselves in float64: what there is to prove is their rounding, and JAX's transformations."""

from __future__ import annotations

from ejkernel_testing import kernel_proofs

#: Sinks, whose weights are 1 where there are no keys.
WITHOUT_KEYS = {"no-keys-and-all-there-is-beside-them", "packed-without-keys"}

globals().update(kernel_proofs("ejkernel-ops", always=WITHOUT_KEYS, grid=False))
