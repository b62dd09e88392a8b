"""``ejkernel.modules``: all operations that ``ejkernel_ops`` has."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import ejkernel_ops

from ._named import front_door

if TYPE_CHECKING:
    from ejkernel_ops import *  # noqa: F403  # what follows has the same types

_FUNCTIONS: dict[str, Any] = {name: getattr(ejkernel_ops, name) for name in ejkernel_ops.__all__}
# Beside the operations, there are the modules with the names of other libraries.
globals().update({name: front_door(value) for name, value in _FUNCTIONS.items() if inspect.isfunction(value)})

__all__ = [name for name, value in _FUNCTIONS.items() if inspect.isfunction(value)]
