"""The order of the rows, which ``moe_permute`` and ``moe_combine`` take: its checks and its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Axes


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


def samples(axes: Axes, arguments: Mapping[str, Any], key: Any) -> dict[str, Any]:
    """The derived samples, with a permutation."""
    concrete = axes.samples(arguments, key)
    order = arguments["token_order"]
    if isinstance(order, jax.ShapeDtypeStruct):
        concrete["token_order"] = jax.random.permutation(key, order.shape[0]).astype(order.dtype)
    return concrete
