"""What the operations mean: their typed front doors, checks and references.

A kernel plugin finds the parts of a definition it has to repeat in ``ejkernel_ops.attention``.
"""

from __future__ import annotations

from ._flash_attention import flash_attention

__all__ = ["flash_attention"]
