"""A lower bound of the cost of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ejkernel_core import Cost

from .axes import AXES, BACKWARD
from .geometry import key_intervals


def forward_cost(arguments: Mapping[str, Any]) -> Cost:
    """Two matrix products over the visible pairs; every array is read or written once."""
    query, value = arguments["query"], arguments["value"]
    flops = 2.0 * pairs(arguments) * query.shape[2] * (query.shape[3] + value.shape[3])
    return Cost(flops, AXES.bytes(arguments))


def backward_cost(arguments: Mapping[str, Any]) -> Cost:
    """Five matrix products over the visible pairs; each gradient has the size of its argument."""
    query, value = arguments["query"], arguments["value"]
    flops = 2.0 * pairs(arguments) * query.shape[2] * (3 * query.shape[3] + 2 * value.shape[3])
    return Cost(flops, BACKWARD.bytes(arguments))


def pairs(arguments: Mapping[str, Any]) -> int:
    """How many (query, key) pairs of one head are visible by causality and window, over the batch.

    Masks, segments and packed sequences depend on values and are ignored: with them it is an upper bound.
    """
    batch, q_length = arguments["query"].shape[:2]
    k_length = arguments["key"].shape[1]
    if arguments["cum_seqlens_q"] is not None:
        return int(batch * q_length * k_length)
    start, end = key_intervals(arguments)
    return int(batch * np.maximum(end - start, 0).sum(dtype=np.int64))
