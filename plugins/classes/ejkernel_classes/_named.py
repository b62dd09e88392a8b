"""Operations by name, and the front door of attention, as programs for ejKernel call them."""

from __future__ import annotations

import functools
from typing import Any

import ejkernel_core

from ._blocks import translated
from ._recording import recording


def call(op: str, *args: Any, cfg: Any = None, backend: str | None = None, **kwargs: Any) -> Any:
    """``ejkernel_core.call``, recorded, and with ``FwdParams`` or ``BwdParams`` for the kernel's own configuration."""
    with recording.listening(), translated(op, args, kwargs, cfg, backend) as own:
        return ejkernel_core.call(op, *args, cfg=own, backend=backend, **kwargs)


def front_door(function: Any) -> Any:
    """The typed function of an operation, whose calls are made the same way."""

    @functools.wraps(function)
    def opened(*args: Any, cfg: Any = None, backend: str | None = None, **kwargs: Any) -> Any:
        given = {name: value for name, value in kwargs.items() if value is not None}
        with recording.listening(), translated(function.__name__, args, given, cfg, backend) as own:
            return function(*args, cfg=own, backend=backend, **kwargs)

    return opened
