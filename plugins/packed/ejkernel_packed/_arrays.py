"""An axis cut into chunks, and put together again."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._checks import at_least


def chunk_array(arr: ArrayLike, chunk_size: int, axis: int = 0, pad_value: Any = 0) -> jax.Array:
    """An axis as two, (chunks, chunk_size), the last chunk filled up with ``pad_value``.

    >>> chunk_array(jnp.arange(10), 4).tolist()
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
    >>> chunk_array(jnp.ones((2, 7, 3)), 4, axis=-2).shape
    (2, 2, 4, 3)
    """
    arr, chunk_size = jnp.asarray(arr), at_least(chunk_size, 1, "chunk_size")
    axis = _place(axis, arr.ndim)
    missing = -arr.shape[axis] % chunk_size
    filled = jnp.pad(arr, [(0, missing * (i == axis)) for i in range(arr.ndim)], constant_values=pad_value)
    chunks = filled.shape[axis] // chunk_size
    return filled.reshape(*arr.shape[:axis], chunks, chunk_size, *arr.shape[axis + 1 :])


def unchunk_array(arr: ArrayLike, original_length: int, axis: int = 0) -> jax.Array:
    """What ``chunk_array`` was given, from what it gave and the same ``axis``: that of the array before, also below 0.

    >>> unchunk_array(jnp.array([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]), 10)
    Array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], dtype=int32)
    """
    arr, original_length = jnp.asarray(arr), at_least(original_length, 0, "original_length")
    if arr.ndim < 2:
        raise ValueError(f"arr: takes two axes for the chunks at least; got the shape {arr.shape}")
    axis = _place(axis, arr.ndim - 1)
    whole = arr.shape[axis] * arr.shape[axis + 1]
    if original_length > whole:
        raise ValueError(f"original_length: is at most {whole}, which is in the chunks; got {original_length}")
    joined = arr.reshape(*arr.shape[:axis], whole, *arr.shape[axis + 2 :])
    return jax.lax.slice_in_dim(joined, 0, original_length, axis=axis)


def _place(axis: int, ndim: int) -> int:
    place = operator.index(axis)
    if not -ndim <= place < ndim:
        raise ValueError(f"axis: is from {-ndim} to {ndim - 1} for {ndim} axes; got {axis}")
    return place % ndim
