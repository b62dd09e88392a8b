"""Checks of arguments. The values of a traced array are unknown, so they are not checked."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


def values(array: Any) -> np.ndarray[Any, Any] | None:
    """The values of an array; None if it is traced."""
    return None if isinstance(array, jax.core.Tracer) else np.asarray(array)


def as_integers(array: ArrayLike, name: str) -> jax.Array:
    """The array as int32, or as int64 if it has 64 bits. A smaller dtype may be too small to count sequences."""
    array = array if isinstance(array, jax.Array) else np.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: takes integers; got {array.dtype}")
    dtype = jax.dtypes.canonicalize_dtype(jnp.int64 if array.dtype.itemsize == 8 else jnp.int32)
    if (concrete := values(array)) is not None and concrete.size:
        for number in (concrete.min(), concrete.max()):
            check_countable(int(number), name, dtype)
    return jnp.asarray(array).astype(dtype)


def check_countable(number: int, name: str, dtype: Any = int) -> int:
    """The number, if the dtype can represent it. By default the dtype is JAX's widest one for integers."""
    limits = jnp.iinfo(jax.dtypes.canonicalize_dtype(dtype))
    if not limits.min <= number <= limits.max:
        wider = "" if limits.bits == 64 else "; jax_enable_x64 allows for int64"
        raise ValueError(f"{name}: takes what {limits.dtype} can count; got {number:,}{wider}")
    return number


def check_boundaries(cu_seqlens: ArrayLike) -> jax.Array:
    """The boundaries, which are cumulative lengths that start at 0 and do not decrease."""
    bounds = as_integers(cu_seqlens, "cu_seqlens")
    if bounds.ndim != 1 or not bounds.size:
        raise ValueError(f"cu_seqlens: takes rank 1 and at least one boundary, the 0; got the shape {bounds.shape}")
    concrete = values(cu_seqlens)
    if concrete is None:
        return bounds
    if concrete[0] != 0:
        raise ValueError(f"cu_seqlens: takes boundaries that start at 0; got {concrete[0]}")
    if (decreases := np.flatnonzero(concrete[1:] < concrete[:-1])).size:
        place = int(decreases[0])
        raise ValueError(
            "cu_seqlens: takes boundaries that do not decrease; "
            f"got {concrete[place]}, then {concrete[place + 1]} at {place + 1}"
        )
    return bounds


def num_tokens(cu_seqlens: ArrayLike) -> int | None:
    """The number of tokens before the last boundary; None if it is traced."""
    concrete = values(cu_seqlens)
    return None if concrete is None else int(concrete[-1])


def static_size(size: int | None, needed: int | None, name: str) -> int:
    """The static size of a result: ``size`` if it is large enough, or what is ``needed`` if ``size`` is None."""
    if size is None:
        if needed is None:
            raise ValueError(f"{name}: takes a static int where the values are traced (under jit); got None")
        return check_countable(int(needed), name)
    size = int_at_least(size, 0, name)
    if needed is not None and size < needed:
        raise ValueError(f"{name}: takes an integer of at least {needed} for these values; got {size}")
    return size


def int_at_least(number: Any, least: int, name: str) -> int:
    """The number, if it is a static int of at least ``least``."""
    try:
        value = operator.index(number)
    except (TypeError, jax.errors.JAXTypeError):
        raise TypeError(f"{name}: takes a static int; got {type(number).__name__}") from None
    if isinstance(number, bool):
        raise TypeError(f"{name}: takes a static int; got a bool")
    if value < least:
        raise ValueError(f"{name}: takes an integer of at least {least}; got {value}")
    return check_countable(value, name)


def as_booleans(mask: ArrayLike) -> jax.Array:
    """The mask as booleans. Integers have to be 0 or 1; where they are traced, all but 0 are True."""
    mask = mask if isinstance(mask, jax.Array) else np.asarray(mask)
    if mask.dtype == jnp.bool_:
        return jnp.asarray(mask)
    if not jnp.issubdtype(mask.dtype, jnp.integer):
        raise TypeError(f"mask: takes booleans, or integers 0 and 1; got {mask.dtype}")
    concrete = values(mask)
    if concrete is not None and concrete.size and not (concrete.min() >= 0 and concrete.max() <= 1):
        raise ValueError(f"mask: takes booleans, or integers 0 and 1; got {concrete.min()} to {concrete.max()}")
    return jnp.asarray(mask) != 0
