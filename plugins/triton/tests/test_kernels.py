"""The portable kernels on the CPU, through Triton's interpreter: every example, in values and gradients."""

from __future__ import annotations

import pytest

from ejkernel_testing import kernel_proofs
from ejkernel_triton.interpreter import interpreted, interpreted_registry


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu():
    with interpreted():
        yield


CLASSES = kernel_proofs(
    "ejkernel-triton",
    registry=interpreted_registry,
    refuses=frozenset({"float64"}),
    roundings=1.5,
    always={
        "no-keys-and-all-there-is-beside-them",  # its sinks have weights of 1
        "packed-without-keys",
        "bias-of-each-query-head",
        "disabled-in-groups",
    },
    # In test_gluon.py, on a card in test_kernels_gpu.py, and in test_decode_kernel.py.
    elsewhere={"gluon_sm90", "gluon_decode_sm90", "triton_decode"},
)
globals().update(CLASSES)
