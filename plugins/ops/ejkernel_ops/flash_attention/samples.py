"""Inputs that mean something, made from abstract ones: for measuring a call that is known by its shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel_core

from .axes import AXES, SIGNATURE

Arguments = dict[str, Any]


def samples(arguments: Mapping[str, Any], key: Any) -> Arguments:
    """The prepared arguments with every abstract array replaced; lengths, ids and results of the forward are valid."""
    made = AXES.samples(arguments, key)
    for name, meant in _MEANT.items():
        if isinstance(arguments.get(name), jax.ShapeDtypeStruct):
            made[name] = meant(arguments[name], arguments)
    if isinstance(arguments.get("lse"), jax.ShapeDtypeStruct):
        made["out"], made["lse"] = _forward(made)
    return made


def _forward(made: Mapping[str, Any]) -> tuple[Any, Any]:
    """The forward's results: what a backward computes from others would mean nothing, and differ between kernels."""
    call = {name: made[name] for name in SIGNATURE.parameters}
    packed = call["cum_seqlens_q"] is not None
    if packed:  # prepared, it is a batch of one
        for name in ("query", "key", "value", "q_segment_ids", "kv_segment_ids"):
            call[name] = None if call[name] is None else call[name][0]
    out, lse = ejkernel_core.call("flash_attention", **{**call, "return_lse": True})
    return (out[None], lse[None]) if packed else (out, lse)


def _runs(like: jax.ShapeDtypeStruct, arguments: Mapping[str, Any]) -> jax.Array:
    """Four segments."""
    ids = jnp.arange(like.shape[1], dtype=like.dtype) * 4 // max(like.shape[1], 1) + 1
    return jnp.broadcast_to(ids, like.shape)


def _even_boundaries(like: jax.ShapeDtypeStruct, total: int) -> jax.Array:
    """Sequences of equal length, as near as it goes."""
    count = like.shape[0] - 1
    return jnp.asarray([total * i // count for i in range(count + 1)], like.dtype)


_MEANT = {
    "cum_seqlens_q": lambda like, arguments: _even_boundaries(like, arguments["query"].shape[1]),
    "cum_seqlens_k": lambda like, arguments: _even_boundaries(like, arguments["key"].shape[1]),
    "q_segment_ids": _runs,
    "kv_segment_ids": _runs,
}
