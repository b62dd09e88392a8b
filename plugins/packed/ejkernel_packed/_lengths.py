"""Lengths and boundaries."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._checks import as_booleans, check_boundaries, check_countable, values


def cdiv(a: Any, b: Any) -> Any:
    """``a / b`` rounded up, for integers: the number of blocks of size ``b`` for ``a``. Two ints give an int.

    >>> cdiv(10, 4)
    3
    >>> cdiv(jnp.array([0, 8, 9]), 4)
    Array([0, 2, 3], dtype=int32)

    A ``b`` below 1 is a ``ValueError``; the result for a traced one is undefined.
    """
    for name, number in (("a", a), ("b", b)):
        if not jnp.issubdtype(jnp.result_type(number), jnp.integer):
            raise TypeError(f"{name}: takes integers; got {jnp.result_type(number)}")
    if (concrete := values(b)) is not None and (concrete < 1).any():
        raise ValueError(f"b: takes integers of at least 1; got {concrete.min()}")
    if not isinstance(a, int) or not isinstance(b, int):
        a, b = _check_number(a, "a"), _check_number(b, "b")
    return a // b + (a % b > 0)


def _check_number(number: Any, name: str) -> Any:
    """An operand, checked. An int stays an int, so that it takes the dtype of the other operand."""
    concrete = values(number)
    if concrete is not None and concrete.size:
        for extreme in (concrete.min(), concrete.max()):
            check_countable(int(extreme), name, int if isinstance(number, int) else concrete.dtype)
    return number if isinstance(number, int) else jnp.asarray(number)


def prepare_lens(cu_seqlens: ArrayLike) -> jax.Array:
    """The length of each sequence.

    >>> prepare_lens(jnp.array([0, 5, 12, 12, 18]))
    Array([5, 7, 0, 6], dtype=int32)
    """
    bounds = check_boundaries(cu_seqlens)
    return bounds[1:] - bounds[:-1]


def prepare_lens_from_mask(mask: ArrayLike) -> jax.Array:
    """The number of valid positions in each row of a (batch, length) mask, as int32.

    >>> prepare_lens_from_mask(jnp.array([[1, 1, 1, 0], [1, 1, 0, 0]]))
    Array([3, 2], dtype=int32)

    The mask has booleans, or integers 0 and 1; of traced integers all but 0 count.
    """
    valid = as_booleans(mask)
    if valid.ndim != 2:
        raise ValueError(f"mask: takes (batch, length); got the shape {valid.shape}")
    return valid.sum(axis=1, dtype=jnp.int32)


def prepare_cu_seqlens_from_mask(mask: ArrayLike, out_dtype: Any = jnp.int32) -> jax.Array:
    """The boundaries of the packed rows of a (batch, length) mask.

    >>> prepare_cu_seqlens_from_mask(jnp.array([[1, 1, 1, 0], [1, 1, 0, 0]]))
    Array([0, 3, 5], dtype=int32)
    """
    if not jnp.issubdtype(np.dtype(out_dtype), jnp.integer):
        raise TypeError(f"out_dtype: takes an integer dtype; got {np.dtype(out_dtype)}")
    lengths = prepare_lens_from_mask(mask)
    if (concrete := values(lengths)) is not None:
        check_countable(int(concrete.sum(dtype=np.int64)), "out_dtype", out_dtype)
    return boundaries_of(lengths, out_dtype)


def boundaries_of(lengths: jax.Array, dtype: Any = None) -> jax.Array:
    """The boundaries of sequences of these lengths: 0 and the cumulative sums."""
    return jnp.pad(jnp.cumsum(lengths, dtype=dtype or lengths.dtype), (1, 0))
