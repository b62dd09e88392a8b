"""``layer_norm`` on TPUs, in Pallas, by the kernel of ``rms_norm``."""

from __future__ import annotations

from ejkernel_pallas_tpu.rms_norm import (
    COMPILERS,
    OPAQUE,
    PLATFORMS,
    VERSION,
    check_cfg,
    compute,
    config_space,
    heuristic_cfg,
    peers,
    run_backend,
    vmem,
)
from ejkernel_pallas_tpu.rms_norm._tuning import Config

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
    "peers",
    "run_backend",
    "vmem",
]
