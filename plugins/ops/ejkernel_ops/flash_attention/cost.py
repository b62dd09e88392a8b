"""A lower bound of the cost of attention."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import jax
import numpy as np

from ejkernel_core import Cost

from .axes import AXES, BACKWARD
from .geometry import key_intervals
from .positions import NAMES, has_positions


def forward_cost(arguments: Mapping[str, Any]) -> Cost:
    """Two matrix products over the visible pairs; every array is read or written once."""
    query, value = arguments["query"], arguments["value"]
    flops = 2.0 * pairs(arguments) * query.shape[2] * (query.shape[3] + value.shape[3])
    return Cost(flops, AXES.bytes(arguments) - _unread_bytes(arguments))


def backward_cost(arguments: Mapping[str, Any]) -> Cost:
    """Five matrix products over the visible pairs; each gradient has the size of its argument."""
    query, value = arguments["query"], arguments["value"]
    flops = 2.0 * pairs(arguments) * query.shape[2] * (3 * query.shape[3] + 2 * value.shape[3])
    return Cost(flops, BACKWARD.bytes(arguments) - _unread_bytes(arguments))


def pairs(arguments: Mapping[str, Any]) -> int:
    """How many (query, key) pairs of one head are visible by causality and window, over the batch.

    Masks, segments and packed sequences depend on values and are ignored: with them it is an upper bound. Lengths and
    positions are those of the samples, on average.
    """
    arguments = _without_positions(arguments)
    batch, q_length = arguments["query"].shape[:2]
    k_length = arguments["key"].shape[1]
    if arguments["cum_seqlens_q"] is not None:
        return int(batch * q_length * k_length)
    start, end = key_intervals(arguments)
    return int(batch * np.maximum(end - start, 0).sum(dtype=np.int64))


def _without_positions(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call of as many pairs whose last query is at the last key, by the keys that a cache holds."""
    if not has_positions(arguments):
        return arguments
    batch, slots, *features = arguments["key"].shape
    key = jax.ShapeDtypeStruct((batch, slots - _unfilled(arguments), *features), arguments["key"].dtype)
    return {**arguments, **dict.fromkeys(NAMES), "key": key}


def _unfilled(arguments: Mapping[str, Any]) -> int:
    """The number of slots that hold no key, in a sample: lengths are from half of the slots to all of them."""
    return 0 if arguments["kv_lengths"] is None else int(arguments["key"].shape[1] // 4)


def _unread_bytes(arguments: Mapping[str, Any]) -> int:
    """The bytes of keys and values in slots that hold none."""
    key, value = arguments["key"], arguments["value"]
    bytes_of_slots: int = sum(x.shape[0] * prod(x.shape[2:]) * x.dtype.itemsize for x in (key, value))
    return _unfilled(arguments) * bytes_of_slots
