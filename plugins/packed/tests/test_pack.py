"""``pack`` and ``unpack``: values, gradients, and attention on packed sequences compared with single sequences."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ejkernel_core
from ejkernel_packed import pack, unpack

BATCH, LENGTH, TOTAL = 3, 4, 14
SETTINGS = settings(max_examples=20, derandomize=True)
LENGTHS = st.lists(st.integers(0, LENGTH), min_size=BATCH, max_size=BATCH)


def weights(shape):
    return np.cos(np.arange(np.prod(shape, dtype=int)).reshape(shape)).astype(np.float32)


def packed_by_loops(padded, lengths, total):
    tokens = [padded[row, position] for row, length in enumerate(lengths) for position in range(length)]
    return np.array(tokens + [np.zeros(padded.shape[2:])] * (total - len(tokens))).reshape(total, *padded.shape[2:])


def unpacked_by_loops(packed, bounds, length):
    out = np.zeros((len(bounds) - 1, length, *packed.shape[1:]), packed.dtype)
    for row, (start, end) in enumerate(itertools.pairwise(bounds)):
        end = min(end, start + length)
        out[row, : end - start] = packed[start:end]
    return out


@functools.cache
def gradient_functions(total, max_length):
    """Functions that pack and unpack and return results with their gradients, eager and jitted."""

    def pack_with_gradient(padded, lengths):
        out, vjp = jax.vjp(lambda x: pack(x, lengths, total_length=total)[0], padded)
        return out, pack(padded, lengths, total_length=total)[1], vjp(jnp.asarray(weights(out.shape)))[0]

    def unpack_with_gradient(packed, bounds):
        out, vjp = jax.vjp(lambda x: unpack(x, bounds, max_length=max_length), packed)
        return out, vjp(jnp.asarray(weights(out.shape)))[0]

    return (pack_with_gradient, unpack_with_gradient), (jax.jit(pack_with_gradient), jax.jit(unpack_with_gradient))


@SETTINGS
@given(LENGTHS, st.sampled_from([((), np.int64), ((2,), np.int32)]))
@example([0] * BATCH, ((), np.int64))
@example([LENGTH] * BATCH, ((2,), np.int32))
@example([0, 4, 0], ((2,), np.int32))
def test_pack_and_unpack_with_gradients(lengths, shape_and_dtype):
    trailing_shape, dtype = shape_and_dtype
    with jax.enable_x64(dtype == np.int64):
        lens = jnp.asarray(np.array(lengths, dtype))
        padded = 1 + weights((BATCH, LENGTH, *trailing_shape))
        valid = np.arange(LENGTH) < np.array(lengths)[:, None]
        for pack_with_gradient, unpack_with_gradient in gradient_functions(TOTAL, LENGTH):
            packed, bounds, d_padded = pack_with_gradient(padded, lens)
            assert bounds.dtype == dtype
            assert bounds.tolist() == [0, *np.cumsum(lengths)]
            np.testing.assert_array_equal(packed, packed_by_loops(padded, lengths, TOTAL))
            np.testing.assert_array_equal(d_padded, unpacked_by_loops(weights(packed.shape), bounds, LENGTH))
            unpacked, d_packed = unpack_with_gradient(packed, bounds)
            np.testing.assert_array_equal(unpacked, padded * valid.reshape(*valid.shape, *(1 for _ in trailing_shape)))
            np.testing.assert_array_equal(d_packed, packed_by_loops(weights(unpacked.shape), lengths, TOTAL))


@pytest.mark.parametrize("lengths", [[0, 0, 0], [4, 0, 1], [0, 2, 3], [2, 2, 1]], ids=str)
def test_sizes_from_the_values(lengths):
    padded = weights((BATCH, LENGTH, 2))
    packed, bounds = pack(padded, np.array(lengths))
    np.testing.assert_array_equal(packed, packed_by_loops(padded, lengths, sum(lengths)))
    unpacked = unpack(packed, bounds)
    np.testing.assert_array_equal(unpacked, unpacked_by_loops(np.asarray(packed), bounds, max(lengths)))


@SETTINGS
@given(LENGTHS)
def test_tokens_beyond_a_static_size_are_dropped_under_jit(lengths):
    padded = weights((BATCH, LENGTH))
    pack_with_gradient, unpack_with_gradient = gradient_functions(5, 3)[1]
    packed, bounds, _ = pack_with_gradient(padded, np.array(lengths))
    assert bounds.tolist() == [0, *np.cumsum(lengths)]
    np.testing.assert_array_equal(packed, packed_by_loops(padded, lengths, 12)[:5] if sum(lengths) <= 12 else None)
    padded_tokens = np.concatenate([packed, np.zeros(12, np.float32)])
    np.testing.assert_array_equal(unpack_with_gradient(packed, bounds)[0], unpacked_by_loops(padded_tokens, bounds, 3))


def test_empty_batches():
    packed, bounds = pack(np.zeros((0, 4, 2)), np.zeros(0, int))
    assert (packed.shape, bounds.tolist()) == ((0, 2), [0])
    assert unpack(packed, bounds).shape == (0, 0, 2)
    assert unpack(packed, bounds, max_length=3).shape == (0, 3, 2)
    packed, bounds = pack(np.zeros((2, 0, 2)), np.zeros(2, int), total_length=3)
    assert (packed.tolist(), bounds.tolist()) == ([[0, 0]] * 3, [0, 0, 0])
    assert unpack(np.zeros((0, 2)), bounds, max_length=1).tolist() == [[[0, 0]]] * 2


def test_booleans_and_integers_are_packed():
    assert pack(np.ones((2, 2), bool), [1, 2], total_length=4)[0].tolist() == [True, True, True, False]
    assert pack(np.ones((2, 2), np.int8), [1, 2])[0].dtype == jnp.int8


INVALID_CALLS = {
    "no total under jit": (lambda: jax.jit(pack)(np.ones((2, 3)), np.array([1, 2])), ValueError, "total_length: takes a static int where the values are traced"),
    "no length under jit": (lambda: jax.jit(unpack)(np.ones(3), np.array([0, 2])), ValueError, "max_length: takes a static int where the values are traced"),
    "a total too small": (lambda: pack(np.ones((2, 3)), [1, 2], total_length=2), ValueError, "total_length: takes an integer of at least 3 for these values; got 2"),
    "rows too short": (lambda: unpack(np.ones(3), [0, 2], max_length=1), ValueError, "max_length: takes an integer of at least 2"),
    "lengths too great": (lambda: pack(np.ones((2, 3)), [1, 4]), ValueError, "lengths: takes integers from 0 to 3; got 1 to 4"),
    "a length below 0": (lambda: pack(np.ones((2, 3)), [1, -1]), ValueError, "lengths: takes integers from 0"),
    "float lengths": (lambda: pack(np.ones((2, 3)), [1.0, 2.0]), TypeError, "lengths: takes integers"),
    "other lengths": (lambda: pack(np.ones((2, 3)), [1]), ValueError, "padded, lengths: take"),
    "no batch": (lambda: pack(np.ones(2), [1, 1]), ValueError, "padded, lengths: take"),
    "a scalar": (lambda: unpack(np.ones(()), [0]), ValueError, "packed: takes"),
    "too few tokens": (lambda: unpack(np.ones(3), [0, 4]), ValueError, "cu_seqlens: takes boundaries of at most 3"),
    "boundaries not from 0": (lambda: unpack(np.ones(3), [1, 2]), ValueError, "cu_seqlens: takes boundaries that start at 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID_CALLS)
def test_invalid_arguments_are_refused(case):
    call, error, message = INVALID_CALLS[case]
    with pytest.raises(error, match=message):
        call()


# -- attention ----------------------------------------------------------------------------------------------------

HEADS, DIM = 2, 8


@jax.jit
def packed_attention(arrays, lengths, d_out):
    """Output and gradients of causal attention on a padded batch, by packing and unpacking."""

    def attend(arrays):
        tokens, bounds = zip(*(pack(array, lengths, total_length=TOTAL) for array in arrays), strict=True)
        out = ejkernel_core.call(
            "flash_attention", *tokens, cum_seqlens_q=bounds[0], cum_seqlens_k=bounds[0], causal=True
        )
        return unpack(out, bounds[0], max_length=LENGTH)

    out, vjp = jax.vjp(attend, arrays)
    return out, *vjp(d_out)[0]


@jax.jit
def single_attention(arrays, d_out):
    """Output and gradients for one sequence with arrays (length, heads, dim), in plain JAX."""

    def attend(arrays):
        query, key, value = arrays
        logits = jnp.einsum("qhd,khd->hqk", query, key) * DIM**-0.5
        mask = jnp.tril(jnp.ones(logits.shape[1:], bool))
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(mask, logits, -jnp.inf)), value)

    out, vjp = jax.vjp(attend, arrays)
    return out, *vjp(d_out)[0]


def check_attention(seed):
    generator = np.random.default_rng(seed)
    *arrays, d_out = generator.normal(size=(4, BATCH, LENGTH, HEADS, DIM)).astype(np.float32)
    lengths = generator.integers(0, LENGTH + 1, BATCH)
    lengths[generator.integers(BATCH)] *= seed % 3 != 0
    results = packed_attention(tuple(arrays), lengths, d_out)
    for row, length in enumerate(lengths):
        expected = single_attention(tuple(array[row, :length] for array in arrays), d_out[row, :length])
        for result, expected_result in zip(results, expected, strict=True):
            np.testing.assert_allclose(result[row, :length], expected_result, rtol=1e-4, atol=1e-5)
            assert not np.asarray(result[row, length:]).any()


@pytest.mark.parametrize("seed", range(5))
def test_attention_on_packed_sequences(seed):
    check_attention(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5, 105))
def test_attention_on_many_packed_sequences(seed):
    check_attention(seed)
