"""Checks of the values of boundaries and segment ids, for ``validate=True``.

The arguments are those of the caller, and so are the indices in messages: the canonical form of a packed call has one
more axis, and integers that are too large have already wrapped around in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

INT32 = np.iinfo(np.int32)


def check_values(arguments: Mapping[str, Any]) -> None:
    """Raise for boundaries that do not divide the tokens into sequences, and for ids that int32 does not hold."""
    for name, array in (("cum_seqlens_q", "query"), ("cum_seqlens_k", "key")):
        if arguments[name] is not None:
            _check_boundaries(name, np.asarray(arguments[name]).tolist(), array, arguments[array].shape[0])
    for name in ("q_segment_ids", "kv_segment_ids"):
        if arguments[name] is not None:
            _check_int32(name, arguments[name])


def _check_boundaries(name: str, boundaries: list[int], array: str, tokens: int) -> None:
    if boundaries[0] != 0:
        raise ValueError(f"{name}[0] must be 0, where the first sequence begins; got {boundaries[0]}")
    previous = 0
    for index, boundary in enumerate(boundaries):
        if boundary < previous:
            raise ValueError(f"{name}[{index}] must be at least {previous}, the boundary before it; got {boundary}")
        if boundary > tokens:
            limit = f"{tokens}, the number of tokens of {array}"
            raise ValueError(f"{name}[{index}] must be at most {limit}; got {boundary}")
        previous = boundary


def _check_int32(name: str, ids: Any) -> None:
    if jnp.iinfo(ids.dtype).max <= INT32.max:  # nothing to check, so no id is copied from the device
        return
    ids = np.asarray(ids)
    outside = np.argwhere((ids < INT32.min) | (ids > INT32.max))
    if len(outside):
        index = tuple(map(int, outside[0]))
        text = ", ".join(map(str, index))
        raise ValueError(f"{name}[{text}] must be from -2**31 to 2**31 - 1, as in int32; got {ids[index]}")
