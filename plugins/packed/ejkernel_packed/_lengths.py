"""Lengths and boundaries."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._checks import booleans, boundaries, countable, values


def cdiv(a: Any, b: Any) -> Any:
    """``a / b`` rounded up, for integers: how many blocks of ``b`` hold ``a``. Two ints give an int.

    >>> cdiv(10, 4)
    3
    >>> cdiv(jnp.array([0, 8, 9]), 4)
    Array([0, 2, 3], dtype=int32)

    A ``b`` below 1 is a ``ValueError``; what a traced one gives then is not defined.
    """
    for name, number in (("a", a), ("b", b)):
        if not jnp.issubdtype(jnp.result_type(number), jnp.integer):
            raise TypeError(f"{name}: takes integers; got {jnp.result_type(number)}")
    if (seen := values(b)) is not None and (seen < 1).any():
        raise ValueError(f"b: is at least 1; got {seen.min()}")
    if not isinstance(a, int) or not isinstance(b, int):
        a, b = _within_reach(a, "a"), _within_reach(b, "b")
    return a // b + (a % b > 0)


def _within_reach(number: Any, name: str) -> Any:
    """What arrays are computed with: an int as it is, so that it takes the dtype of the other."""
    seen = values(number)
    if seen is not None and seen.size:
        for end in (seen.min(), seen.max()):
            countable(int(end), name, int if isinstance(number, int) else seen.dtype)
    return number if isinstance(number, int) else jnp.asarray(number)


def prepare_lens(cu_seqlens: ArrayLike) -> jax.Array:
    """The length of each sequence.

    >>> prepare_lens(jnp.array([0, 5, 12, 12, 18]))
    Array([5, 7, 0, 6], dtype=int32)
    """
    bounds = boundaries(cu_seqlens)
    return bounds[1:] - bounds[:-1]


def prepare_lens_from_mask(mask: ArrayLike) -> jax.Array:
    """How many positions of each row of a (batch, length) mask are valid, in int32.

    >>> prepare_lens_from_mask(jnp.array([[1, 1, 1, 0], [1, 1, 0, 0]]))
    Array([3, 2], dtype=int32)

    The mask has booleans, or integers 0 and 1; of traced integers all but 0 count.
    """
    valid = booleans(mask)
    if valid.ndim != 2:
        raise ValueError(f"mask: takes (batch, length); got the shape {valid.shape}")
    return valid.sum(axis=1, dtype=jnp.int32)


def prepare_cu_seqlens_from_mask(mask: ArrayLike, out_dtype: Any = jnp.int32) -> jax.Array:
    """The boundaries of what the rows of a (batch, length) mask hold, once packed.

    >>> prepare_cu_seqlens_from_mask(jnp.array([[1, 1, 1, 0], [1, 1, 0, 0]]))
    Array([0, 3, 5], dtype=int32)
    """
    if not jnp.issubdtype(np.dtype(out_dtype), jnp.integer):
        raise TypeError(f"out_dtype: takes an integer dtype; got {np.dtype(out_dtype)}")
    lengths = prepare_lens_from_mask(mask)
    if (seen := values(lengths)) is not None:
        countable(int(seen.sum(dtype=np.int64)), "out_dtype", out_dtype)
    return boundaries_of(lengths, out_dtype)


def boundaries_of(lengths: jax.Array, dtype: Any = None) -> jax.Array:
    """0, and the sums of the lengths so far."""
    return jnp.pad(jnp.cumsum(lengths, dtype=dtype or lengths.dtype), (1, 0))
