"""``ejkernel.modules``: the operations."""

from __future__ import annotations

from ejkernel_ops import flash_attention

__all__ = ["flash_attention"]
