from __future__ import annotations

from ejkernel_testing import KernelProofs


class TestFlashAttention(KernelProofs):
    kernel = "flash_attention.xla"
    backward = "flash_attention_bwd.xla"
