"""The dropout mask: a function of seed and coordinates alone, so that every backend and every pass draws the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def keep_mask(seed: Any, probability: float, row: Any, query: Any, key: Any) -> jax.Array:
    """True where a weight survives, with probability ``1 - probability``.

    ``row`` is ``batch_index * heads + head``; ``query`` and ``key`` are token indices. All are broadcast together.
    The bits are a chain of 32-bit mixers, one mixing per weight and the rest per query, in plain uint32 arithmetic:
    a kernel in any language can repeat it. ``docs/operations/flash_attention.md`` states it as a formula.
    """
    state = mix(mix(_u32(seed) + _u32(0x9E3779B9)) ^ _u32(row))
    state = mix(state ^ _u32(query))
    bits = mix(state + _u32(key) * _u32(0x9E3779B9))
    return bits >= _u32(threshold(probability))


def threshold(probability: float) -> int:
    """A weight is dropped when its 32 bits, as an unsigned number, are below this."""
    return min(round(probability * 2**32), 2**32 - 1)


def mix(x: jax.Array) -> jax.Array:
    """A bijection of 32-bit words in which every input bit moves every output bit (xor-shift, multiply, twice)."""
    x = x ^ (x >> _u32(16))
    x = x * _u32(0x7FEB352D)
    x = x ^ (x >> _u32(15))
    x = x * _u32(0x846CA68B)
    return x ^ (x >> _u32(16))


def _u32(x: Any) -> jax.Array:
    return jnp.asarray(np.uint32(x) if isinstance(x, int) else x).astype(jnp.uint32)
