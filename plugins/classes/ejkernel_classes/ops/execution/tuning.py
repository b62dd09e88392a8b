"""``ejkernel.ops.execution.tuning``: measuring."""

from __future__ import annotations

from ejkernel_tuning import autotune, autotune_recorded, benchmark

__all__ = ["autotune", "autotune_recorded", "benchmark"]
