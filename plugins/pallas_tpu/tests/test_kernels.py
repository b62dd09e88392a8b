"""The kernels on the CPU, through Pallas' interpreter: every example, in values and gradients."""

from __future__ import annotations

from ejkernel_pallas_tpu.testing import interpreted_registry
from ejkernel_testing import kernel_proofs

CLASSES = kernel_proofs(
    "ejkernel-pallas-tpu",
    registry=interpreted_registry,
    refuses=frozenset({"float64", "float16"}),
    roundings=1.5,
    always={
        "no-keys-and-all-there-is-beside-them",  # its sinks have weights of 1
        "packed-without-keys",
        "causal-fewer-queries-than-keys",
    },
    elsewhere={"pallas_tpu_decode"},  # in test_decode_kernel.py
)
globals().update(CLASSES)
