"""The random numbers of the words of a vocabulary, as ``ejkernel_ops.sample_tokens.noise`` defines them."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

#: A constant of Threefry's schedule of keys.
PARITY = tl.constexpr(0x1BD11BDA)
#: The largest share whose exponential number is finite.
MOST = tl.constexpr(1 - 2.0**-24)
SHARE = tl.constexpr(2.0**-32)


@triton.jit
def gumbel(keys, row, word):
    """The noise of these words, by the two words of the key of a row."""
    bits = _random_bits(tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1), word.to(tl.uint32))
    share = tl.minimum((bits.to(tl.float32) + 0.5) * SHARE, MOST)
    # The logarithm of 1 - share; what that difference has lost is added, because small shares decide.
    rest = 1 - share
    exponential = (rest - 1 + share) / rest - tl.log(rest)
    return -tl.log(exponential)


@triton.jit
def _random_bits(first, second, counter):
    third = first ^ second ^ PARITY
    left = tl.zeros_like(counter) + first
    right = counter + second
    left, right = _rounds(left, right, 13, 15, 26, 6)
    left, right = left + second, right + third + 1
    left, right = _rounds(left, right, 17, 29, 16, 24)
    left, right = left + third, right + first + 2
    left, right = _rounds(left, right, 13, 15, 26, 6)
    left, right = left + first, right + second + 3
    left, right = _rounds(left, right, 17, 29, 16, 24)
    left, right = left + second, right + third + 4
    left, right = _rounds(left, right, 13, 15, 26, 6)
    left, right = left + third, right + first + 5
    return left ^ right


@triton.jit
def _rounds(left, right, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """Four rounds, which rotate by so many bits."""
    left += right
    right = ((right << A) | (right >> (32 - A))) ^ left
    left += right
    right = ((right << B) | (right >> (32 - B))) ^ left
    left += right
    right = ((right << C) | (right >> (32 - C))) ^ left
    left += right
    right = ((right << D) | (right >> (32 - D))) ^ left
    return left, right
