"""Inputs for tests of attention."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["generate_attention_inputs"]

#: The standard deviation of the numbers: so small that a softmax of their products is nearly uniform.
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
    """Query, key and value by name, (batch, length, heads, head_dim) each: independent normal numbers times 0.02.

    >>> inputs = generate_attention_inputs(1, 16, 4, 8, num_kv_heads=2, kv_len=20)
    >>> {name: array.shape for name, array in inputs.items()}
    {'query': (1, 16, 4, 8), 'key': (1, 20, 2, 8), 'value': (1, 20, 2, 8)}

    ``num_kv_heads`` and ``kv_len`` are by default those of the query. ``key`` is a key of ``jax.random``, by default
    ``jax.random.key(0)``. Numbers are drawn in float32, or in float64 for float64, and rounded to ``dtype``.
    """
    heads, kv_heads = (
        _size(num_heads, "num_heads"),
        _size(num_heads if num_kv_heads is None else num_kv_heads, "num_kv_heads"),
    )
    if heads % kv_heads:
        raise ValueError(f"num_kv_heads: must divide num_heads={heads}; got {kv_heads}")
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype: takes a floating dtype; got {dtype!r}")
    batch, dim = _size(batch_size, "batch_size", 0), _size(head_dim, "head_dim")
    length = _size(seq_len, "seq_len", 0)
    kv_shape = (batch, length if kv_len is None else _size(kv_len, "kv_len", 0), kv_heads, dim)
    shapes = {"query": (batch, length, heads, dim), "key": kv_shape, "value": kv_shape}
    keys = jax.random.split(jax.random.key(0) if key is None else key, len(shapes))
    draw_dtype = dtype if jnp.finfo(dtype).bits > 32 else jnp.float32
    return {
        name: (SCALE * jax.random.normal(array_key, shape, draw_dtype)).astype(dtype)
        for (name, shape), array_key in zip(shapes.items(), keys, strict=True)
    }


def _size(value: Any, name: str, minimum: int = 1) -> int:
    """The value, if it is a whole number of at least ``minimum``."""
    try:
        size = operator.index(value)
    except TypeError:
        size = None
    if size is None or isinstance(value, bool):
        raise TypeError(f"{name}: takes a whole number; got {value!r}")
    if size < minimum:
        raise ValueError(f"{name}: must be at least {minimum}; got {size}")
    return size
