"""The random numbers of each word of a vocabulary, by a counter: they depend on a row's key and the word alone.

So a row draws the same token in any batch, with any padding of the vocabulary, and on any part of it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

#: By how many bits each round rotates, in turns, and a constant of the key's schedule: Threefry with two words of 32
#: bits and 20 rounds (Salmon and others, 2011).
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def gumbel(key: jax.Array, vocabulary: int, dtype: Any) -> jax.Array:
    """(rows, vocabulary): to the logits, these are added, and the largest sum is the draw. ``key`` is (rows, 2)."""
    return gumbel_of(random_bits(key[:, :1], key[:, 1:], jnp.arange(vocabulary, dtype=jnp.uint32)), dtype)


def gumbel_of(bits: jax.Array, dtype: Any) -> jax.Array:
    """From 32 random bits. The largest numbers, which decide, are those with the most of their digits."""
    return gumbel_of_number(bits.astype(dtype))


def gumbel_of_number(number: jax.Array) -> jax.Array:
    """The same, from the bits as a floating number."""
    share = (number + 0.5) * 2.0**-32
    exponential = -jnp.log1p(-jnp.minimum(share, 1 - 2.0**-24))
    return -jnp.log(exponential)


def random_bits(first: jax.Array, second: jax.Array, counter: jax.Array) -> jax.Array:
    """32 bits for each counter, by a key of two words: those of ``jax.random.bits`` with its default generator."""
    schedule = (first, second, first ^ second ^ jnp.uint32(PARITY))
    left, right = jnp.broadcast_arrays(first, counter + second)
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            left = left + right
            right = ((right << rotation) | (right >> (32 - rotation))) ^ left
        left = left + schedule[(group + 1) % 3]
        right = right + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return left ^ right
