"""The references against themselves in float64: what there is to prove is their rounding, and JAX's transformations."""

from __future__ import annotations

from ejkernel_testing import kernel_proofs

#: Sinks, whose weights are 1 where there are no keys.
WITHOUT_KEYS = {"no-keys-and-all-there-is-beside-them", "packed-without-keys"}

CLASSES = kernel_proofs("ejkernel-ops", quick=0.04, always=WITHOUT_KEYS, grid=False)
for proofs in CLASSES.values():
    if proofs.kernel.startswith("layer_norm_quantized"):
        proofs.quick = 0.0  # it is layer_norm's statistics and rms_norm_quantized's scales, which are quick here
globals().update(CLASSES)
