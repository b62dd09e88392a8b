"""The numbers of a step: logits, their depths, the places of words and their noise."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops.sample_tokens.noise import gumbel_of_number, random_bits

#: Behind all depths, that of -inf too; and behind all words.
LAST = 2**31 - 1
#: The depth of the largest finite number.
LAST_FINITE = 0x7F7FFFFF
#: The bits of a depth.
BITS = 31


def in_range(logits: jax.Array) -> jax.Array:
    """In float32; inf counts as the largest number, and NaN as -inf. Mosaic takes a NaN to equal itself, so that
    ``isnan`` finds none: it is what is neither inf nor below.
    """
    wide = logits.astype(jnp.float32)
    return jnp.where(wide == jnp.inf, np.finfo(np.float32).max, jnp.where(wide < jnp.inf, wide, -jnp.inf))


def bits_of(numbers: jax.Array) -> jax.Array:
    bits: jax.Array = jax.lax.bitcast_convert_type(numbers, jnp.int32)
    return bits


def number_of(bits: jax.Array) -> jax.Array:
    numbers: jax.Array = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return numbers


def words_of(shape: tuple[int, ...], columns: Any) -> jax.Array:
    """The places of columns in the vocabulary."""
    words: jax.Array = columns.start + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return words


def noise_of(first: jax.Array, second: jax.Array, word: jax.Array) -> jax.Array:
    """That of ``noise.gumbel``."""
    return gumbel_of_number(rounded(random_bits(first, second, word.astype(jnp.uint32))))


def rounded(bits: jax.Array) -> jax.Array:
    """The float32 that is nearest to 32 bits without a sign. Halves of them fit into integers with a sign, which every
    TPU converts, and their sum is the only one that is rounded.
    """
    high, low = (half.astype(jnp.int32).astype(jnp.float32) for half in (bits >> 16, bits & 0xFFFF))
    return high * 2.0**16 + low


def earlier(one: Any, other: Any) -> tuple[jax.Array, ...]:
    """Of two words with their depths the earlier one."""
    is_earlier = other[0] < one[0]
    return tuple(jnp.where(is_earlier, b, a) for a, b in zip(one, other, strict=True))


def larger(one: Any, other: Any) -> tuple[jax.Array, ...]:
    """Of two sums with their words the larger one, and the first of equal ones."""
    is_larger = other[0] > one[0]
    return tuple(jnp.where(is_larger, b, a) for a, b in zip(one, other, strict=True))
