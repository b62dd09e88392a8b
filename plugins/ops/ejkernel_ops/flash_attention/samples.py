"""Meaningful inputs for abstract ones, to measure a call of which only the shapes are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .axes import AXES
from .positions import ring_positions

Arguments = dict[str, Any]


def samples(arguments: Mapping[str, Any], key: Any) -> Arguments:
    """The canonical arguments with every abstract array replaced; boundaries, ids, lengths and positions are valid."""
    concrete = AXES.samples(arguments, key)
    for name, sample in _SAMPLES.items():
        if isinstance(arguments.get(name), jax.ShapeDtypeStruct):
            concrete[name] = sample(arguments[name], arguments)
    return _with_positions(concrete, arguments, key)


def _segment_ids(like: jax.ShapeDtypeStruct, arguments: Mapping[str, Any]) -> jax.Array:
    """Four segments."""
    ids = jnp.arange(like.shape[1], dtype=like.dtype) * 4 // max(like.shape[1], 1) + 1
    return jnp.broadcast_to(ids, like.shape)


def _even_boundaries(like: jax.ShapeDtypeStruct, total: int) -> jax.Array:
    """Sequences of lengths that differ by one token at most."""
    count = like.shape[0] - 1
    return jnp.asarray([total * i // count for i in range(count + 1)], like.dtype)


_SAMPLES = {
    "cum_seqlens_q": lambda like, arguments: _even_boundaries(like, arguments["query"].shape[1]),
    "cum_seqlens_k": lambda like, arguments: _even_boundaries(like, arguments["key"].shape[1]),
    "q_segment_ids": _segment_ids,
    "kv_segment_ids": _segment_ids,
}


def _with_positions(concrete: Arguments, arguments: Mapping[str, Any], key: Any) -> Arguments:
    """The last query stands at the last key of a cache, which is at least half full, or of a ring that is full."""
    is_abstract = {name: isinstance(value, jax.ShapeDtypeStruct) for name, value in arguments.items()}
    q_length, slots = concrete["query"].shape[1], concrete["key"].shape[1]
    if is_abstract.get("kv_lengths"):
        concrete["kv_lengths"] = _lengths(arguments["kv_lengths"], slots, key)
    if is_abstract.get("q_start"):
        end = slots if concrete.get("kv_lengths") is None else concrete["kv_lengths"]
        if concrete.get("kv_positions") is not None:  # the ring has been written twice, and a part of it once more
            end = 2 * slots + _lengths(arguments["q_start"], slots, key)
        concrete["q_start"] = jnp.full(arguments["q_start"].shape, end - q_length, jnp.int32)
    if is_abstract.get("kv_positions"):
        concrete["kv_positions"] = ring_positions(concrete["q_start"] + q_length, slots)
    return concrete


def _lengths(like: jax.ShapeDtypeStruct, slots: int, key: Any) -> jax.Array:
    """Lengths from half of the slots to all of them."""
    return jax.random.randint(key, like.shape, slots - slots // 2, slots + 1, jnp.int32)
