"""``ejkernel.ops.core.types``: what a kernel is generic in."""

from __future__ import annotations

from ejkernel_classes import Cfg, Out

__all__ = ["Cfg", "Out"]
