"""Random values for arrays of which only shapes and dtypes are known, like those of real programs."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp

#: The largest number of bits of integers that are values, such as quantized weights. Wider ones are lengths or indices.
NARROW_BITS = 8
_SCALE = re.compile(r"(^|_)scales?$")


def random_array(name: str, like: Any, key: Any) -> jax.Array:
    """Normal numbers; any integers of at most eight bits, and zeros of more, because 0 is mostly a valid index; mostly
    True; and powers of two from 1/16 to 1 for scales, which are arrays of that name or of exponents alone.

    >>> random_array("k_scale", jax.ShapeDtypeStruct((3,), "float32"), jax.random.key(0)).min() > 0
    Array(True, dtype=bool)
    """
    dtype = like.dtype
    if jnp.issubdtype(dtype, jnp.bool_):
        return jax.random.bernoulli(key, 0.9, like.shape)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(key, like.shape)
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        if limits.bits > NARROW_BITS:
            return jnp.zeros(like.shape, dtype)
        return jax.random.randint(key, like.shape, int(limits.min), int(limits.max) + 1).astype(dtype)
    if _SCALE.search(name) or dtype == jnp.float8_e8m0fnu:
        return jnp.exp2(jax.random.randint(key, like.shape, -4, 1).astype(jnp.float32)).astype(dtype)
    return jax.random.normal(key, like.shape, jnp.float32).astype(dtype)


def bits(dtype: Any) -> int:
    """The number of bits of one entry in memory, where several entries of fewer than eight share a byte."""
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return 8 * int(dtype.itemsize) if is_key else int(jax.dtypes.itemsize_bits(dtype))
