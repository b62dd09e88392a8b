from __future__ import annotations

from ejkernel_core.testing import KernelProofs


class TestFlashAttention(KernelProofs):
    kernel = "flash_attention.xla"
