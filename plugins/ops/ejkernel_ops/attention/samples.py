"""Inputs that mean something, made from abstract ones: for measuring a call that is known by its shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel_core

from .signature import SIGNATURE

Arguments = dict[str, Any]


def samples(arguments: Mapping[str, Any], key: Any) -> Arguments:
    """The prepared arguments with every abstract array replaced: normal numbers; valid lengths, ids and masks."""
    made = dict(arguments)
    abstract = {name: value for name, value in arguments.items() if isinstance(value, jax.ShapeDtypeStruct)}
    for name, draw in zip(abstract, jax.random.split(key, max(len(abstract), 1)), strict=False):
        made[name] = _sample(name, abstract[name], draw, arguments)
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


def _sample(name: str, like: jax.ShapeDtypeStruct, key: Any, arguments: Mapping[str, Any]) -> jax.Array:
    if name in ("cum_seqlens_q", "cum_seqlens_k"):
        side = "query" if name == "cum_seqlens_q" else "key"
        return _even_boundaries(like, arguments[side].shape[1])
    if name in ("q_segment_ids", "kv_segment_ids"):
        return jnp.broadcast_to(
            jnp.arange(like.shape[1], dtype=like.dtype) * 4 // max(like.shape[1], 1) + 1, like.shape
        )
    if name == "attention_mask":
        return jax.random.bernoulli(key, 0.9, like.shape)
    if name == "dropout_seed":
        return jnp.asarray(0, like.dtype)
    return jax.random.normal(key, like.shape, jnp.float32).astype(like.dtype)


def _even_boundaries(like: jax.ShapeDtypeStruct, total: int) -> jax.Array:
    """Sequences of equal length, as near as it goes."""
    count = like.shape[0] - 1
    return jnp.asarray([total * i // count for i in range(count + 1)], like.dtype)
