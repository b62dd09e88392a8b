"""Checks of the values of boundaries, segment ids, lengths and positions, for ``validate=True``.

The arguments are those of the caller, and so are the indices in messages: the canonical form of a packed call has one
more axis, and integers that are too large have already wrapped around in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .positions import MAX_POSITION

INT32 = np.iinfo(np.int32)


def check_values(arguments: Mapping[str, Any]) -> None:
    """Raise for boundaries that do not divide the tokens into sequences, for ids that int32 does not hold, for more
    keys than a cache has, and for two keys at one position.
    """
    for name, array in (("cum_seqlens_q", "query"), ("cum_seqlens_k", "key")):
        if arguments[name] is not None:
            _check_boundaries(name, np.asarray(arguments[name]).tolist(), array, arguments[array].shape[0])
    for name in ("q_segment_ids", "kv_segment_ids"):
        if arguments[name] is not None:
            _check_int32(name, arguments[name])
    if arguments["q_start"] is not None:
        _check_range("q_start", arguments["q_start"], -MAX_POSITION, MAX_POSITION - 1)
    if arguments["kv_lengths"] is not None:
        keys = arguments["key"].shape[1]
        _check_range("kv_lengths", arguments["kv_lengths"], 0, keys, ", the number of slots of key")
    if arguments["kv_positions"] is not None:
        _check_range("kv_positions", arguments["kv_positions"], -1, MAX_POSITION - 1)
        _check_distinct("kv_positions", np.asarray(arguments["kv_positions"]))


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
        place, value = _entry(name, ids, outside[0])
        raise ValueError(f"{place} must be from -2**31 to 2**31 - 1, as in int32; got {value}")


def _check_range(name: str, numbers: Any, lowest: int, highest: int, what: str = "") -> None:
    numbers = np.asarray(numbers)
    outside = np.argwhere((numbers < lowest) | (numbers > highest))
    if len(outside):
        place, value = _entry(name, numbers, outside[0])
        raise ValueError(f"{place} must be from {lowest} to {highest}{what}; got {value}")


def _check_distinct(name: str, positions: np.ndarray) -> None:
    """Raise for a position that two slots of a row have; any number of slots may be empty."""
    for row, values in enumerate(positions.tolist()):
        slots: dict[int, int] = {}
        for slot, position in enumerate(values):
            if position >= 0 and slots.setdefault(position, slot) != slot:
                raise ValueError(
                    f"{name}[{row}, {slot}] must be another position than {name}[{row}, {slots[position]}]; "
                    f"got {position} twice"
                )


def _entry(name: str, array: np.ndarray, index: Any) -> tuple[str, Any]:
    """The place of an entry as the caller would write it, and its value."""
    index = tuple(map(int, index))
    return f"{name}[{', '.join(map(str, index))}]" if index else name, array[index]
