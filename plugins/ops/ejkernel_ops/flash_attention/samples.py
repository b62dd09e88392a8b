"""Meaningful inputs for abstract ones, to measure a call of which only the shapes are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel_core

from .axes import AXES, SIGNATURE

Arguments = dict[str, Any]


def samples(arguments: Mapping[str, Any], key: Any) -> Arguments:
    """The canonical arguments with every abstract array replaced; boundaries, ids and forward results are valid."""
    concrete = AXES.samples(arguments, key)
    for name, sample in _SAMPLES.items():
        if isinstance(arguments.get(name), jax.ShapeDtypeStruct):
            concrete[name] = sample(arguments[name], arguments)
    if isinstance(arguments.get("lse"), jax.ShapeDtypeStruct):
        concrete["out"], concrete["lse"] = _forward(concrete)
    return concrete


def _forward(arguments: Mapping[str, Any]) -> tuple[Any, Any]:
    """The results of the forward: with any others, kernels of the backward would not agree."""
    call = {name: arguments[name] for name in SIGNATURE.parameters}
    is_packed = call["cum_seqlens_q"] is not None
    if is_packed:  # in canonical form it is a batch of one
        for name in ("query", "key", "value", "q_segment_ids", "kv_segment_ids"):
            call[name] = None if call[name] is None else call[name][0]
    out, lse = ejkernel_core.call("flash_attention", **{**call, "return_lse": True})
    return (out[None], lse[None]) if is_packed else (out, lse)


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
