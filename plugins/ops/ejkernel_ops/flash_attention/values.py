"""Which values the arrays of an attention call may have: what ``validate=True`` looks at.

The arguments are as the caller wrote them, and so are the places: prepared, a packed call has one more axis, and
integers that are too large have become others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

INT32 = np.iinfo(np.int32)


def check_values(arguments: Mapping[str, Any]) -> None:
    """Raise for boundaries that do not cut the tokens into sequences, and for ids that are not what they become."""
    for name, of in (("cum_seqlens_q", "query"), ("cum_seqlens_k", "key")):
        if arguments[name] is not None:
            _check_boundaries(name, np.asarray(arguments[name]).tolist(), of, arguments[of].shape[0])
    for name in ("q_segment_ids", "kv_segment_ids"):
        if arguments[name] is not None:
            _check_int32(name, arguments[name])


def _check_boundaries(name: str, boundaries: list[int], of: str, tokens: int) -> None:
    if boundaries[0] != 0:
        raise ValueError(f"{name}[0] takes 0, where the first sequence begins; got {boundaries[0]}")
    before = 0
    for place, boundary in enumerate(boundaries):
        if boundary < before:
            raise ValueError(f"{name}[{place}] takes at least {before}, the boundary before it; got {boundary}")
        if boundary > tokens:
            raise ValueError(f"{name}[{place}] takes at most {tokens}, the number of tokens of {of}; got {boundary}")
        before = boundary


def _check_int32(name: str, ids: Any) -> None:
    if jnp.iinfo(ids.dtype).max <= INT32.max:  # and none has to be fetched
        return
    ids = np.asarray(ids)
    outside = np.argwhere((ids < INT32.min) | (ids > INT32.max))
    if len(outside):
        place = tuple(map(int, outside[0]))
        told = ", ".join(map(str, place))
        raise ValueError(f"{name}[{told}] takes an id from -2**31 to 2**31 - 1, as int32 does; got {ids[place]}")
