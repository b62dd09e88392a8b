"""Meaningful inputs for abstract ones, to measure a call of which only the shapes are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .axes import AXES

Arguments = dict[str, Any]


def samples(arguments: Mapping[str, Any], key: Any) -> Arguments:
    """The canonical arguments with every abstract array replaced; boundaries and ids are valid."""
    concrete = AXES.samples(arguments, key)
    for name, sample in _SAMPLES.items():
        if isinstance(arguments.get(name), jax.ShapeDtypeStruct):
            concrete[name] = sample(arguments[name], arguments)
    return concrete


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
