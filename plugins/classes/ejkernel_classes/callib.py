"""``ejkernel.callib``: what a GPU's block can hold."""

from __future__ import annotations

from ejkernel_ops.calibration import (
    estimate_shared_memory_bytes,
    get_shared_memory_limit,
    select_num_stages,
    select_num_warps,
)

__all__ = ["estimate_shared_memory_bytes", "get_shared_memory_limit", "select_num_stages", "select_num_warps"]
