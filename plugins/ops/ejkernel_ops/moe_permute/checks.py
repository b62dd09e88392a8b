"""Checks that ``moe_permute`` and ``moe_combine`` have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = tuple(jnp.dtype(name) for name in ("float16", "bfloat16", "float32", "float64"))


def check_floats(name: str, array: Any) -> None:
    """Raise for an array that is not floating-point."""
    if array.dtype not in DTYPES:
        raise TypeError(f"{name}: takes {', '.join(map(str, DTYPES))}; got {array.dtype}")


def check_order(order: Any) -> None:
    """Raise unless the order is integers."""
    if not jnp.issubdtype(order.dtype, jnp.integer):
        raise TypeError(f"token_order: takes integers, as moe_route returns them; got {order.dtype}")


def check_permutation(arguments: Mapping[str, Any]) -> None:
    """Raise for an order in which a place is missing, for ``validate=True``."""
    order = np.asarray(arguments["token_order"])
    for index in np.flatnonzero((order < 0) | (order >= order.size)):
        raise ValueError(f"token_order[{index}] must be from 0 to {order.size - 1}; got {order[index]}")
    missing = np.setdiff1d(np.arange(order.size), order)
    if missing.size:
        raise ValueError(f"token_order must have each number below {order.size} once; {missing[0]} is missing")


def order_sample(like: jax.ShapeDtypeStruct, key: Any) -> jax.Array:
    """A permutation."""
    return jax.random.permutation(key, like.shape[0]).astype(like.dtype)
