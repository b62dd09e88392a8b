"""A result of tuning as the ``cfg`` of a call: its fastest configuration."""

from __future__ import annotations

import sys
from typing import Any

import ejkernel_core
from ejkernel_core import Record


def record_of_result(op: str, cfg: Any, backend: str | None) -> Record | None:
    """The record with which to make a call whose ``cfg`` is a ``TuningResult``; None for any other ``cfg``."""
    module = sys.modules.get("ejkernel_tuning._result")  # before it is imported, there is no such object
    is_result = module is not None and isinstance(cfg, module.TuningResult)
    return cfg.record_for(op, backend) if is_result else None


def cfg_and_backend(op: str, cfg: Any, backend: str | None) -> tuple[Any, str | None]:
    """Those of a call of an operation by name, whose ``cfg`` may be a ``TuningResult``.

    Its backend is named only where several kernels have configurations of this type, because a backend that is named
    holds for the backward pass too.
    """
    record = record_of_result(op, cfg, backend)
    if record is None:
        return cfg, backend
    config_type = None if record.cfg is None else type(record.cfg)
    kernels = [kernel for kernel in ejkernel_core.registry.kernels(op)[0] if kernel.config_type is config_type]
    return record.cfg, backend if len(kernels) == 1 and record.cfg is not None else record.backend
