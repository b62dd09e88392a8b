"""The operations: one folder each, with a typed front door, checks, a reference and examples.

The parts of a definition that kernels have to repeat are functions in the operation's folder.
"""

from __future__ import annotations

from .flash_attention import flash_attention
from .layer_norm import layer_norm
from .rms_norm import rms_norm

__all__ = ["flash_attention", "layer_norm", "rms_norm"]
