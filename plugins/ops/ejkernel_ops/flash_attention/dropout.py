"""The dropout mask: a function of seed and coordinates only, so that it is the same in every backend and pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def keep_mask(seed: Any, probability: float, row: Any, query: Any, key: Any) -> jax.Array:
    """True where a weight is not dropped, with probability ``1 - probability``.

    ``row`` is ``batch_index * heads + head``; ``query`` and ``key`` are token indices. All are broadcast together.
    The bits come from a chain of 32-bit mixers in plain uint32 arithmetic, one of them per weight and the others per
    query, so that a kernel in any language can compute them. ``docs/operations/flash_attention.md`` has the formula.
    """
    state = mix(mix(_u32(seed) + _u32(0x9E3779B9)) ^ _u32(row))
    state = mix(state ^ _u32(query))
    bits = mix(state + _u32(key) * _u32(0x9E3779B9))
    return bits >= _u32(threshold(probability))


def threshold(probability: float) -> int:
    """A weight is dropped if its 32 bits, as an unsigned number, are below this."""
    return min(round(probability * 2**32), 2**32 - 1)


def mix(x: jax.Array) -> jax.Array:
    """A bijection of 32-bit words in which every input bit affects every output bit (xor-shift, multiply, twice)."""
    x = x ^ (x >> _u32(16))
    x = x * _u32(0x7FEB352D)
    x = x ^ (x >> _u32(15))
    x = x * _u32(0x846CA68B)
    return x ^ (x >> _u32(16))


def _u32(x: Any) -> jax.Array:
    return jnp.asarray(np.uint32(x) if isinstance(x, int) else x).astype(jnp.uint32)
