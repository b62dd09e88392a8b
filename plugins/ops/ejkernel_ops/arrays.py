"""Checks of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

#: Those of floating-point arrays that the operations take.
DTYPES = tuple(jnp.dtype(name) for name in ("float16", "bfloat16", "float32", "float64"))


def check_floats(name: str, array: Any) -> None:
    """Raise for an array that is not floating-point, or narrower than 16 bits."""
    if array.dtype not in DTYPES:
        raise TypeError(f"{name}: takes {', '.join(map(str, DTYPES))}; got {array.dtype}")


def check_integers(name: str, array: Any) -> None:
    """Raise for an array that is not integers."""
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: takes integers; got {array.dtype}")


def accept(arguments: Mapping[str, Any]) -> None:
    """For ``validate=True``: all values are valid."""
