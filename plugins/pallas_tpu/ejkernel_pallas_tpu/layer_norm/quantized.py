"""``layer_norm_quantized`` on TPUs, in Pallas, by the kernel of ``rms_norm_quantized``."""

from __future__ import annotations

from ejkernel_pallas_tpu.rms_norm._tuning import Config
from ejkernel_pallas_tpu.rms_norm.quantized import (
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
