"""What attention costs at least."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ejkernel_core import Cost

from .axes import AXES, BACKWARD
from .tokens import band


def forward_cost(arguments: Mapping[str, Any]) -> Cost:
    """Two matrix products over the pairs that see each other; every array read or written once."""
    query, value = arguments["query"], arguments["value"]
    flops = 2.0 * pairs(arguments) * query.shape[2] * (query.shape[3] + value.shape[3])
    return Cost(flops, AXES.bytes(arguments))


def backward_cost(arguments: Mapping[str, Any]) -> Cost:
    """Five matrix products for the forward's two; the gradients are as large as what they belong to."""
    query, value = arguments["query"], arguments["value"]
    flops = 2.0 * pairs(arguments) * query.shape[2] * (3 * query.shape[3] + 2 * value.shape[3])
    return Cost(flops, BACKWARD.bytes(arguments))


def pairs(arguments: Mapping[str, Any]) -> int:
    """How many (query, key) pairs of one head see each other by causality and window, over the batch.

    Masks, segments and packed sequences depend on values and are not counted: this is then an upper bound.
    """
    batch, q_length = arguments["query"].shape[:2]
    k_length = arguments["key"].shape[1]
    if arguments["cum_seqlens_q"] is not None:
        return int(batch * q_length * k_length)
    left, right = band(arguments["causal"], arguments["sliding_window"])
    own = np.arange(q_length, dtype=np.int64) + k_length - q_length
    first = np.zeros_like(own) if left is None else np.clip(own - left, 0, k_length)
    last = np.full_like(own, k_length) if right is None else np.clip(own + right + 1, 0, k_length)
    return int(batch * np.maximum(last - first, 0).sum())
