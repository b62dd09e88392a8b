"""The kernels on the CPU, through Triton's interpreter: every case of the operation, in values and gradients."""

from __future__ import annotations

import pytest

from ejkernel_testing import KernelProofs
from ejkernel_triton import flash_attention
from ejkernel_triton.flash_attention import backward as flash_attention_bwd
from ejkernel_triton.interpreter import interpreted, interpreted_registry


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu():
    with interpreted():
        yield


class TestFlashAttention(KernelProofs):
    kernel = "flash_attention.triton"
    backward = "flash_attention_bwd.triton"
    registry = interpreted_registry(
        {"flash_attention.triton": flash_attention, "flash_attention_bwd.triton": flash_attention_bwd}
    )
    refuses = frozenset({"float64"})
    roundings = 1.5
