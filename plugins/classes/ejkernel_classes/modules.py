"""``ejkernel.modules``: all operations that ``ejkernel_ops`` has."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import ejkernel_ops

from ._named import front_door

if TYPE_CHECKING:
    from ejkernel_ops import *  # noqa: F403  # what follows has the same types

# Beside the operations, there are modules with the names of other libraries, and functions that only prepare a call.
# Those of operations take a kernel by name.
_FUNCTIONS: dict[str, Any] = {
    name: value
    for name, value in ((name, getattr(ejkernel_ops, name)) for name in ejkernel_ops.__all__)
    if inspect.isfunction(value) and "backend" in inspect.signature(value).parameters
}
globals().update({name: front_door(value) for name, value in _FUNCTIONS.items()})

__all__ = list(_FUNCTIONS)
