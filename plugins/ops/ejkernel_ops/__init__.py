"""What the operations mean: one folder each, with its typed front door, its checks, its reference and its examples.

A kernel plugin finds the parts of a definition that it has to repeat in the operation's folder.
"""

from __future__ import annotations

from .flash_attention import flash_attention

__all__ = ["flash_attention"]
