"""Where queries and keys stand in a cache: ``q_start``, ``kv_lengths`` and ``kv_positions``.

A kernel gets ``q_start``, (batch,), wherever a call has any of the three; ``kv_lengths``, (batch,), and
``kv_positions``, (batch, keys), only where the caller passes them, and never both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops.arrays import check_integers
from ejkernel_ops.symbolic import is_symbolic

Arguments = dict[str, Any]

NAMES = ("q_start", "kv_lengths", "kv_positions")
#: Positions of keys are from 0 to below it, and those of queries from its negative: with a window, which is at most
#: twice as wide, sums of all three are int32.
MAX_POSITION = 2**29


def has_positions(arguments: Mapping[str, Any]) -> bool:
    """Whether a canonical call says where its queries stand."""
    return arguments["q_start"] is not None


def prepare_positions(arguments: Mapping[str, Any]) -> Arguments:
    """The three arguments in canonical form, after checks."""
    given = {name: arguments[name] for name in NAMES if arguments[name] is not None}
    if not given:
        return {}
    _check_combination(arguments, given)
    for name, array in given.items():
        check_integers(name, array)
    rows = {name: _one_for_each_row(name, given[name], arguments["query"]) for name in NAMES[:2] if name in given}
    if "kv_positions" in given:
        rows["kv_positions"] = given["kv_positions"].astype(jnp.int32)
    if "q_start" not in rows:
        rows["q_start"] = rows["kv_lengths"] - jnp.asarray(arguments["query"].shape[1], jnp.int32)
    return rows


def _check_combination(arguments: Mapping[str, Any], given: Arguments) -> None:
    if arguments["cum_seqlens_q"] is not None:
        name = next(iter(given))
        raise ValueError(f"{name}: takes None with cum_seqlens_q, which say where the queries of each sequence stand")
    if "kv_positions" in given and "kv_lengths" in given:
        raise ValueError("kv_lengths: takes None with kv_positions, which are -1 where a slot is empty")
    if "kv_positions" in given and "q_start" not in given:
        raise ValueError("q_start: kv_positions need the position of the first query; got None")


def _one_for_each_row(name: str, array: Any, query: Any) -> jax.Array:
    """A scalar, or one integer for each entry of the batch, as int32 (batch,)."""
    batch = query.shape[:1]
    if array.shape not in ((), batch):
        raise ValueError(f"{name}: takes one integer, or one for each of {batch[0]} batch entries; got {array.shape}")
    return jnp.broadcast_to(array.astype(jnp.int32), batch)


def ring_positions(ends: Any, slots: int) -> Any:
    """The position of each slot's key, (batch, slots), in rings that hold the keys before ``ends``, (batch,): the key
    of position p is in slot ``p % slots``, and an empty slot has -1. NumPy arrays give NumPy arrays.

    >>> ring_positions(np.array([6, 3]), 4).tolist()
    [[4, 5, 2, 3], [0, 1, 2, -1]]
    """
    xp = np if isinstance(ends, np.ndarray) else jnp
    ends = xp.asarray(ends)
    if ends.ndim != 1 or not jnp.issubdtype(ends.dtype, jnp.integer):
        raise ValueError(f"ends: takes integers, one for each batch entry; got {ends.dtype} {ends.shape}")
    last = ends[:, None] - 1
    positions = last - (last - np.arange(slots, dtype=np.int32)[None]) % max(slots, 1)
    return xp.where(positions >= 0, positions, -1).astype(np.int32)


def is_filled(arguments: Mapping[str, Any]) -> jax.Array | None:
    """Which slots of the cache hold a key, (batch, keys); None if all of them do.

    What the others hold is not defined, and may be NaN.

    >>> key = jax.ShapeDtypeStruct((2, 4, 1, 16), "float32")
    >>> is_filled({"key": key, "kv_lengths": jnp.array([1, 3]), "kv_positions": None}).astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 1, 0]]
    """
    filled: jax.Array
    if arguments["kv_positions"] is not None:
        filled = arguments["kv_positions"] >= 0
        return filled
    if arguments["kv_lengths"] is None:
        return None
    filled = jnp.arange(arguments["key"].shape[1], dtype=jnp.int32)[None] < arguments["kv_lengths"][:, None]
    return filled


def without_unfilled(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The call with zeros for the keys and values of empty slots, whose gradients are exactly 0 then."""
    filled = is_filled(arguments)
    if filled is None:
        return arguments
    zeroed = {name: jnp.where(filled[:, :, None, None], arguments[name], 0) for name in ("key", "value")}
    return {**arguments, **zeroed}


def query_positions(arguments: Mapping[str, Any]) -> jax.Array:
    """The position of each query, (batch, queries)."""
    index = jnp.arange(arguments["query"].shape[1], dtype=jnp.int32)
    positions: jax.Array = arguments["q_start"][:, None] + index[None]
    return positions


def key_positions(arguments: Mapping[str, Any]) -> Any:
    """The position of each slot, (batch, keys), or (1, keys) where it is the slot's number."""
    if arguments["kv_positions"] is not None:
        return arguments["kv_positions"]
    slots = arguments["key"].shape[1]
    return (jnp if is_symbolic(slots) else np).arange(slots, dtype=np.int32)[None]
