"""The kernels on the CPU, through Pallas' interpreter: every example, in values and gradients."""

from __future__ import annotations

from ejkernel_pallas_tpu.testing import interpreted_registry
from ejkernel_testing import kernel_proofs

CLASSES = kernel_proofs(
    "ejkernel-pallas-tpu",
    registry=interpreted_registry,
    refuses=frozenset({"float64", "float16"}),
    roundings=1.5,
    quick=0.05,
    always={"no-keys-and-all-there-is-beside-them", "packed-without-keys"},  # their sinks have weights of 1
)
for proofs in CLASSES.values():
    if proofs.kernel.startswith("layer_norm"):
        proofs.quick = 0.0  # it has the kernel of rms_norm; what differs is in test_norms.py
globals().update(CLASSES)
