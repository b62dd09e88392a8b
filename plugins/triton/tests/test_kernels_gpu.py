"""The kernels on a card."""

from __future__ import annotations

import pytest

from ejkernel_core.testing import KernelProofs

pytestmark = pytest.mark.gpu


class TestFlashAttention(KernelProofs):
    kernel = "flash_attention.triton"
    platform = "gpu"
    refuses = frozenset({"float64"})
    roundings = 1.5
