"""``ejkernel.ops.execution.executor``: what runs kernels."""

from __future__ import annotations

from ejkernel_classes import Executor

__all__ = ["Executor"]
