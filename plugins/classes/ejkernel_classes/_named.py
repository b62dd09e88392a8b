"""Calls of operations by name, and of typed functions, with the parameters of ejKernel."""

from __future__ import annotations

import functools
from typing import Any

import ejkernel_core

from ._blocks import kernel_config
from ._recording import recording


def call(op: str, *args: Any, cfg: Any = None, backend: str | None = None, **kwargs: Any) -> Any:
    """``ejkernel_core.call``, recorded, and with ``FwdParams`` or ``BwdParams`` for the kernel's own configuration."""
    with recording.record_calls(), kernel_config(op, args, kwargs, cfg, backend) as kernel_cfg:
        return ejkernel_core.call(op, *args, cfg=kernel_cfg, backend=backend, **kwargs)


def front_door(function: Any) -> Any:
    """The typed function of an operation, with recording and parameters like ``call``."""

    @functools.wraps(function)
    def wrapper(*args: Any, cfg: Any = None, backend: str | None = None, **kwargs: Any) -> Any:
        arguments = {name: value for name, value in kwargs.items() if value is not None}
        with recording.record_calls(), kernel_config(function.__name__, args, arguments, cfg, backend) as kernel_cfg:
            return function(*args, cfg=kernel_cfg, backend=backend, **kwargs)

    return wrapper
