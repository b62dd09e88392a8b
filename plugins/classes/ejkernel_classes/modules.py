"""``ejkernel.modules``: the operations."""

from __future__ import annotations

from ._attention import flash_attention

__all__ = ["flash_attention"]
