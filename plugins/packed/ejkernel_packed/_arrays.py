"""Split an axis into chunks, and join them again."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._checks import int_at_least


def chunk_array(arr: ArrayLike, chunk_size: int, axis: int = 0, pad_value: Any = 0) -> jax.Array:
    """Split an axis into two, (chunks, chunk_size). The last chunk is padded with ``pad_value``.

    >>> chunk_array(jnp.arange(10), 4).tolist()
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
    >>> chunk_array(jnp.ones((2, 7, 3)), 4, axis=-2).shape
    (2, 2, 4, 3)
    """
    arr, chunk_size = jnp.asarray(arr), int_at_least(chunk_size, 1, "chunk_size")
    axis = _normal_axis(axis, arr.ndim)
    padding = -arr.shape[axis] % chunk_size
    padded = jnp.pad(arr, [(0, padding * (i == axis)) for i in range(arr.ndim)], constant_values=pad_value)
    chunks = padded.shape[axis] // chunk_size
    return padded.reshape(*arr.shape[:axis], chunks, chunk_size, *arr.shape[axis + 1 :])


def unchunk_array(arr: ArrayLike, original_length: int, axis: int = 0) -> jax.Array:
    """The inverse of ``chunk_array``, with the same ``axis``, which is that of the original array, also below 0.

    >>> unchunk_array(jnp.array([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]), 10)
    Array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], dtype=int32)
    """
    arr, original_length = jnp.asarray(arr), int_at_least(original_length, 0, "original_length")
    if arr.ndim < 2:
        raise ValueError(f"arr: takes two axes for the chunks at least; got the shape {arr.shape}")
    axis = _normal_axis(axis, arr.ndim - 1)
    total = arr.shape[axis] * arr.shape[axis + 1]
    if original_length > total:
        raise ValueError(
            f"original_length: takes an integer of at most {total}, the length of the chunks; got {original_length}"
        )
    flat = arr.reshape(*arr.shape[:axis], total, *arr.shape[axis + 2 :])
    return jax.lax.slice_in_dim(flat, 0, original_length, axis=axis)


def _normal_axis(axis: int, ndim: int) -> int:
    place = operator.index(axis)
    if not -ndim <= place < ndim:
        raise ValueError(f"axis: takes an integer from {-ndim} to {ndim - 1} for {ndim} axes; got {axis}")
    return place % ndim
