"""Checks of the values of group sizes, for ``validate=True``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def check_values(arguments: Mapping[str, Any], rows_of: str = "lhs") -> None:
    """Raise for sizes that are negative or more than the rows, and for an offset that is none of a group.

    ``rows_of``: the array that has the rows.
    """
    sizes = np.asarray(arguments["group_sizes"], dtype=object)
    rows, end = arguments[rows_of].shape[0], 0
    for group, size in enumerate(sizes):
        if size < 0:
            raise ValueError(f"group_sizes[{group}] must be at least 0; got {size}")
        end += size
        if end > rows:
            raise ValueError(f"group_sizes[{group}]: {rows_of} has {rows} rows; the sizes up to this one sum to {end}")
    if arguments["group_offset"] is not None:
        offset = int(np.asarray(arguments["group_offset"]).reshape(()))
        if not 0 <= offset < len(sizes):
            raise ValueError(f"group_offset must be the number of a group, from 0 to {len(sizes) - 1}; got {offset}")


def check_boundaries(arguments: Mapping[str, Any]) -> None:
    """Raise for boundaries that fall or are not rows."""
    previous, rows = 0, arguments["lhs"].shape[0]
    for index, boundary in enumerate(np.asarray(arguments["boundaries"]).tolist()):
        if not previous <= boundary <= rows:
            raise ValueError(f"boundaries[{index}] must be from {previous} to {rows}; got {boundary}")
        previous = boundary
