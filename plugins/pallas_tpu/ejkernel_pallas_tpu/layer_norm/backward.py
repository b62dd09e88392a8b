"""``layer_norm_bwd`` on TPUs, in Pallas, by the kernel of ``rms_norm_bwd``."""

from __future__ import annotations

from ejkernel_pallas_tpu.rms_norm._tuning import Config
from ejkernel_pallas_tpu.rms_norm.backward import (
    COMPILERS,
    OPAQUE,
    PLATFORMS,
    VERSION,
    check_cfg,
    compute,
    config_space,
    heuristic_cfg,
    run_backend,
    vmem,
)

__all__ = [
    "COMPILERS",
    "OPAQUE",
    "PLATFORMS",
    "VERSION",
    "Config",
    "check_cfg",
    "compute",
    "config_space",
    "heuristic_cfg",
    "run_backend",
    "vmem",
]
