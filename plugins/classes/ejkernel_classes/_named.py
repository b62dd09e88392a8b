"""Calls of operations by name, and of typed functions, with the parameters of ejKernel."""

from __future__ import annotations

import functools
from typing import Any

import ejkernel_core
from ejkernel_core.extend import ends_at_caller

from ._blocks import kernel_config
from ._recording import recording
from ._tuned import cfg_and_backend


def call(op: str, *args: Any, cfg: Any = None, backend: str | None = None, **kwargs: Any) -> Any:
    """``ejkernel_core.call``, recorded. ``cfg`` also takes ``FwdParams``, ``BwdParams`` and a ``TuningResult``."""
    cfg, backend = cfg_and_backend(op, cfg, backend)
    with recording.record_calls(), kernel_config(op, args, kwargs, cfg, backend) as kernel_cfg:
        return ejkernel_core.call(op, *args, cfg=kernel_cfg, backend=backend, **kwargs)


def front_door(function: Any) -> Any:
    """The typed function of an operation, with recording and parameters like ``call``."""

    @ends_at_caller
    @functools.wraps(function)
    def wrapper(*args: Any, cfg: Any = None, backend: str | None = None, **kwargs: Any) -> Any:
        cfg, backend = cfg_and_backend(function.__name__, cfg, backend)
        arguments = {name: value for name, value in kwargs.items() if value is not None}
        with recording.record_calls(), kernel_config(function.__name__, args, arguments, cfg, backend) as kernel_cfg:
            return function(*args, cfg=kernel_cfg, backend=backend, **kwargs)

    return wrapper
