"""``ejkernel.ops.execution.executor``: what runs kernels."""

from __future__ import annotations

from ejkernel_classes import ConfigChooser, Executor

__all__ = ["ConfigChooser", "Executor"]
