"""``ejkernel.ops.execution.tuning``: measuring."""

from __future__ import annotations

from ejkernel_classes._autotuner import Autotuner
from ejkernel_tuning import autotune, autotune_recorded, benchmark

__all__ = ["Autotuner", "autotune", "autotune_recorded", "benchmark"]
