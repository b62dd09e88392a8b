"""What is looked at before anything is computed. Of a traced array the values cannot be seen: they are not checked."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


def values(array: Any) -> np.ndarray[Any, Any] | None:
    """The numbers of an array, or None while it is traced."""
    return None if isinstance(array, jax.core.Tracer) else np.asarray(array)


def integers(array: ArrayLike, name: str) -> jax.Array:
    """As int32, and as int64 where it has 64 bits: ids count sequences, which may be more than a small dtype holds."""
    array = array if isinstance(array, jax.Array) else np.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: takes integers; got {array.dtype}")
    dtype = jax.dtypes.canonicalize_dtype(jnp.int64 if array.dtype.itemsize == 8 else jnp.int32)
    if (seen := values(array)) is not None and seen.size:
        for number in (seen.min(), seen.max()):
            countable(int(number), name, dtype)
    return jnp.asarray(array).astype(dtype)


def countable(number: int, name: str, dtype: Any = int) -> int:
    """The number, where an array of the dtype can hold it: by default of the widest integers that JAX now has."""
    limits = jnp.iinfo(jax.dtypes.canonicalize_dtype(dtype))
    if not limits.min <= number <= limits.max:
        wider = "" if limits.bits == 64 else "; jax_enable_x64 allows for int64"
        raise ValueError(f"{name}: takes what {limits.dtype} can count; got {number:,}{wider}")
    return number


def boundaries(cu_seqlens: ArrayLike) -> jax.Array:
    """Cumulative lengths from 0 that do not decrease."""
    given = integers(cu_seqlens, "cu_seqlens")
    if given.ndim != 1 or not given.size:
        raise ValueError(f"cu_seqlens: takes rank 1 and at least one boundary, the 0; got the shape {given.shape}")
    seen = values(cu_seqlens)
    if seen is None:
        return given
    if seen[0] != 0:
        raise ValueError(f"cu_seqlens: starts at 0; got {seen[0]}")
    if (falls := np.flatnonzero(seen[1:] < seen[:-1])).size:
        place = int(falls[0])
        raise ValueError(f"cu_seqlens: does not decrease; got {seen[place]}, then {seen[place + 1]} at {place + 1}")
    return given


def tokens(cu_seqlens: ArrayLike) -> int | None:
    """How many tokens there are before the last boundary, or None while it is traced."""
    seen = values(cu_seqlens)
    return None if seen is None else int(seen[-1])


def size(given: int | None, needed: int | None, name: str) -> int:
    """The static size of a result: what is needed where nothing is given, else what is given, if that is enough."""
    if given is None:
        if needed is None:
            raise ValueError(f"{name}: has to be given, as a static int, where the values are traced (under jit)")
        return countable(int(needed), name)
    given = at_least(given, 0, name)
    if needed is not None and given < needed:
        raise ValueError(f"{name}: is at least {needed}, which are there; got {given}")
    return given


def at_least(number: Any, least: int, name: str) -> int:
    """A static int that is not below ``least``."""
    try:
        given = operator.index(number)
    except (TypeError, jax.errors.JAXTypeError):
        raise TypeError(f"{name}: takes a static int; got {type(number).__name__}") from None
    if isinstance(number, bool):
        raise TypeError(f"{name}: takes a static int; got a bool")
    if given < least:
        raise ValueError(f"{name}: is at least {least}; got {given}")
    return countable(given, name)


def booleans(mask: ArrayLike) -> jax.Array:
    """A mask of booleans, or of integers that are 0 or 1. Of traced integers all but 0 are True."""
    mask = mask if isinstance(mask, jax.Array) else np.asarray(mask)
    if mask.dtype == jnp.bool_:
        return jnp.asarray(mask)
    if not jnp.issubdtype(mask.dtype, jnp.integer):
        raise TypeError(f"mask: takes booleans, or integers 0 and 1; got {mask.dtype}")
    seen = values(mask)
    if seen is not None and seen.size and not (seen.min() >= 0 and seen.max() <= 1):
        raise ValueError(f"mask: takes booleans, or integers 0 and 1; got {seen.min()} to {seen.max()}")
    return jnp.asarray(mask) != 0
