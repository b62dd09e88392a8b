"""``ejkernel.ops.core.kernel``: a kernel, and one call of it."""

from __future__ import annotations

from ejkernel_classes import Invocation, Kernel

__all__ = ["Invocation", "Kernel"]
