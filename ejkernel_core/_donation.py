"""``donate=True``: an eager call updates an argument in place, and takes it away from the caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ._display import brief
from ._jax_versions import mapped_by_vmap
from ._operation import Operation


def check_donation(operation: Operation, arrays: Mapping[str, Any], donate: Any) -> None:
    """Raise where an array cannot be given away. Inside a trace of ``jax.jit``, XLA decides, and nothing is checked."""
    if not isinstance(donate, bool):
        raise TypeError(f"{operation.name}: donate takes True or False; got {brief(donate)}")
    if donate and not operation.aliases:
        raise ValueError(f"{operation.name}: donate=True has nothing to give away: it updates no argument in place")
    levels = mapped_by_vmap(arrays) if donate else None
    if levels is None:
        return
    for name in operation.aliases.values():
        twice = next((other for other, array in arrays.items() if other != name and array is arrays.get(name)), None)
        if twice is not None:
            raise ValueError(
                f"{operation.name}: donate=True gives {name} away, and {twice} is the same array: pass a copy"
            )
        if any(name not in mapped for mapped in levels):
            raise ValueError(
                f"{operation.name}: donate=True cannot give {name} away, because jax.vmap does not map over it, and "
                "each element updates a copy of it: leave donate out, or map over it"
            )


def deleted_argument(operation: Operation, arrays: Mapping[str, Any]) -> ValueError | None:
    """The error for an array that an earlier call was given; None where there is none."""
    for name, array in arrays.items():
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.is_deleted():
            return ValueError(
                f"{operation.name}: {name} was given away, by donate=True of an earlier call or donate_argnums of "
                "jax.jit: use what that call returned"
            )
    return None
