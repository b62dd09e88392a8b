"""Inputs for tests of attention."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["generate_attention_inputs"]

#: Of the numbers: small, so that a softmax of their products is nearly flat.
SCALE = 0.02


def generate_attention_inputs(
    batch_size: int = 2,
    seq_len: int = 128,
    num_heads: int = 8,
    head_dim: int = 64,
    dtype: Any = jnp.float32,
    key: jax.Array | None = None,
    *,
    num_kv_heads: int | None = None,
    kv_len: int | None = None,
) -> dict[str, jax.Array]:
    """Query, key and value by name, (batch, length, heads, head_dim) each: three independent draws of normal numbers
    times 0.02.

    >>> inputs = generate_attention_inputs(1, 16, 4, 8, num_kv_heads=2, kv_len=20)
    >>> {name: array.shape for name, array in inputs.items()}
    {'query': (1, 16, 4, 8), 'key': (1, 20, 2, 8), 'value': (1, 20, 2, 8)}

    ``num_kv_heads`` and ``kv_len`` are those of the queries by default. ``key`` is a key of ``jax.random``, by default
    ``jax.random.key(0)``. Numbers are drawn in float32, or in float64 for float64, and rounded to ``dtype``.
    """
    heads, kv_heads = (
        _size(num_heads, "num_heads"),
        _size(num_heads if num_kv_heads is None else num_kv_heads, "num_kv_heads"),
    )
    if heads % kv_heads:
        raise ValueError(f"num_kv_heads: divides num_heads={heads}; got {kv_heads}")
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype: takes a floating dtype; got {dtype!r}")
    batch, dim = _size(batch_size, "batch_size", 0), _size(head_dim, "head_dim")
    length = _size(seq_len, "seq_len", 0)
    others = (batch, length if kv_len is None else _size(kv_len, "kv_len", 0), kv_heads, dim)
    shapes = {"query": (batch, length, heads, dim), "key": others, "value": others}
    draws = jax.random.split(jax.random.key(0) if key is None else key, len(shapes))
    wide = dtype if jnp.finfo(dtype).bits > 32 else jnp.float32
    return {
        name: (SCALE * jax.random.normal(draw, shape, wide)).astype(dtype)
        for (name, shape), draw in zip(shapes.items(), draws, strict=True)
    }


def _size(given: Any, name: str, least: int = 1) -> int:
    try:
        size = operator.index(given)
    except TypeError:
        size = None
    if size is None or isinstance(given, bool):
        raise TypeError(f"{name}: takes a whole number; got {given!r}")
    if size < least:
        raise ValueError(f"{name}: is at least {least}; got {size}")
    return size
