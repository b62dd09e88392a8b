"""Lengths, boundaries, ids and chunks compared with plain NumPy, eagerly and under jit, in int32 and int64."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ejkernel_packed as packed

#: Few shapes, because each is compiled: all ways to split four tokens into three sequences, and one static total.
#: Other numbers of sequences and tokens are explicit examples, with one dtype each.
TOTAL = 6
SETTINGS = settings(max_examples=30, derandomize=True)
LENGTHS = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda ends: np.diff([0, *sorted(ends), 4]).tolist())
DTYPES = st.sampled_from([np.int32, np.int64])


def boundaries(lengths, dtype=np.int32):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)


def tokens(lengths):
    return [(number, position) for number, length in enumerate(lengths) for position in range(length)]


def chunks(lengths, size):
    return [(number, chunk) for number, length in enumerate(lengths) for chunk in range(-(-length // size))]


def padded(pairs, total):
    return np.array(pairs + [(-1, 0)] * (total - len(pairs))).reshape(-1, 2)


@contextlib.contextmanager
def enable_x64_for(dtype):
    with jax.enable_x64(dtype == np.int64):
        yield


def check(result, expected, dtype):
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, expected)


@functools.cache
def jitted(name, **static):
    return jax.jit(functools.partial(getattr(packed, name), **static))


@SETTINGS
@given(LENGTHS, DTYPES)
@example([], np.int32)
@example([4], np.int32)
@example([0, 0, 0], np.int64)
@example([0, 4, 0], np.int32)
def test_tokens(lengths, dtype):
    with enable_x64_for(dtype):
        bounds = jnp.asarray(boundaries(lengths, dtype))
        expected, padded_pairs = np.array(tokens(lengths)).reshape(-1, 2), padded(tokens(lengths), TOTAL)
        check(packed.prepare_lens(bounds), lengths, dtype)
        check(jitted("prepare_lens")(bounds), lengths, dtype)
        for name, select in {
            "prepare_sequence_ids": lambda pairs: pairs[:, 0],
            "segment_ids_from_cu_seqlens": lambda pairs: pairs[:, 0] + 1,
            "prepare_position_ids": lambda pairs: pairs[:, 1],
            "prepare_token_indices": lambda pairs: pairs,
        }.items():
            check(getattr(packed, name)(bounds), select(expected), dtype)
            check(getattr(packed, name)(bounds, total_length=TOTAL), select(padded_pairs), dtype)
            check(jitted(name, total_length=TOTAL)(bounds), select(padded_pairs), dtype)


@pytest.mark.long
@SETTINGS
@given(LENGTHS, st.sampled_from([1, 3]), DTYPES)
@example([], 3, np.int32)
@example([4], 3, np.int32)
@example([0, 0, 0], 3, np.int64)
def test_chunks(lengths, chunk_size, dtype):
    with enable_x64_for(dtype):
        bounds = jnp.asarray(boundaries(lengths, dtype))
        counts = [-(-length // chunk_size) for length in lengths]
        expected = chunks(lengths, chunk_size)
        check(packed.prepare_chunk_offsets(bounds, chunk_size), boundaries(counts), dtype)
        check(jitted("prepare_chunk_offsets", chunk_size=chunk_size)(bounds), boundaries(counts), dtype)
        check(packed.prepare_chunk_indices(bounds, chunk_size), padded(expected, len(expected)), dtype)
        static = {"chunk_size": chunk_size, "total_chunks": TOTAL}
        check(packed.prepare_chunk_indices(bounds, **static), padded(expected, TOTAL), dtype)
        check(jitted("prepare_chunk_indices", **static)(bounds), padded(expected, TOTAL), dtype)


@SETTINGS
@given(LENGTHS, st.sampled_from([0, 2]), DTYPES)
@example([], 2, np.int32)
@example([4], 0, np.int32)
@example([0, 0, 0], 2, np.int64)
def test_boundaries_are_recovered_from_segment_ids(lengths, padding, dtype):
    with enable_x64_for(dtype):
        bounds = boundaries(lengths, dtype)
        ids = packed.segment_ids_from_cu_seqlens(bounds, total_length=int(bounds[-1]) + padding)
        lengths_without_last_zeros = np.trim_zeros(np.array([0, *lengths]), "b")[1:]
        check(packed.cu_seqlens_from_segment_ids(ids), boundaries(lengths_without_last_zeros), dtype)
        check(packed.cu_seqlens_from_segment_ids(ids, num_sequences=len(lengths)), bounds, dtype)
        padded_ids = packed.segment_ids_from_cu_seqlens(bounds, total_length=TOTAL)
        check(jitted("cu_seqlens_from_segment_ids", num_sequences=len(lengths))(padded_ids), bounds, dtype)


@SETTINGS
@given(
    st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=3, max_size=3),
    st.sampled_from([bool, np.int32, np.uint8]),
    DTYPES,
)
@example([], bool, np.int32)
@example([[False] * 4] * 3, np.int32, np.int64)
def test_lengths_of_a_mask(rows, mask_dtype, dtype):
    with enable_x64_for(dtype):
        mask = np.array(rows).reshape(-1, 4).astype(mask_dtype)
        lengths = [sum(row) for row in rows]
        for function in (packed.prepare_lens_from_mask, jitted("prepare_lens_from_mask")):
            check(function(mask), lengths, np.int32)
        for function in (packed.prepare_cu_seqlens_from_mask, jitted("prepare_cu_seqlens_from_mask")):
            check(function(mask), boundaries(lengths), np.int32)
        check(packed.prepare_cu_seqlens_from_mask(mask, out_dtype=dtype), boundaries(lengths), dtype)


@SETTINGS
@given(st.integers(-9, 2**31 - 1), st.integers(1, 2**31 - 1))
@example(2**31 - 1, 2)
def test_cdiv(a, b):
    expected = -(-a // b)
    assert packed.cdiv(a, b) == expected
    assert type(packed.cdiv(a, b)) is int
    check(packed.cdiv(jnp.array([a]), b), [expected], np.int32)
    check(jitted("cdiv")(jnp.array([a]), jnp.array([b])), [expected], np.int32)


def test_cdiv_of_the_largest_uint32():
    check(packed.cdiv(jnp.uint32(2**32 - 1), jnp.uint32(2)), 2**31, np.uint32)


def test_boundaries_of_a_small_dtype_can_have_many_sequences():
    bounds = np.zeros(401, np.uint8)
    bounds[-1] = 2
    check(packed.prepare_sequence_ids(bounds), [399, 399], np.int32)
    check(packed.prepare_sequence_ids(bounds, total_length=3), [399, 399, -1], np.int32)


def test_tokens_beyond_a_static_size_are_dropped_under_jit():
    check(jitted("prepare_token_indices", total_length=3)(jnp.array([0, 2, 4])), [[0, 0], [0, 1], [1, 0]], np.int32)
    check(jitted("prepare_token_indices", total_length=0)(jnp.array([0, 2, 4])), np.zeros((0, 2)), np.int32)


def test_constant_boundaries_need_no_total_under_jit():
    bounds = jnp.array([0, 2, 3])
    check(jax.jit(lambda: packed.prepare_position_ids(bounds))(), [0, 1, 0], np.int32)


def test_invalid_boundaries_raise_nothing_under_jit():
    """The results have no meaning, but the requested size."""
    for bounds in ([1, 2, 3], [0, 3, 1], [0, -1, 9]):
        for name, static in STATIC_SIZES.items():
            assert (
                jitted(name, **FUNCTIONS_OF_BOUNDARIES[name], **static)(jnp.array(bounds)).shape[0] == len(bounds) - 1
            )


def test_a_traced_integer_mask_is_true_where_it_is_not_zero():
    check(jitted("prepare_lens_from_mask")(jnp.array([[0, 2, -1]])), [2], np.int32)


FUNCTIONS_OF_BOUNDARIES = {
    "prepare_lens": {},
    "prepare_position_ids": {},
    "prepare_sequence_ids": {},
    "prepare_token_indices": {},
    "segment_ids_from_cu_seqlens": {},
    "prepare_chunk_offsets": {"chunk_size": 2},
    "prepare_chunk_indices": {"chunk_size": 2},
}


#: The static size that each function needs under jit, here the number of sequences.
STATIC_SIZES = {
    "prepare_lens": {},
    "prepare_position_ids": {"total_length": 2},
    "prepare_sequence_ids": {"total_length": 2},
    "prepare_token_indices": {"total_length": 2},
    "segment_ids_from_cu_seqlens": {"total_length": 2},
    "prepare_chunk_indices": {"total_chunks": 2},
}


@pytest.mark.parametrize("name", FUNCTIONS_OF_BOUNDARIES)
@pytest.mark.parametrize(
    ("bounds", "error", "message"),
    [
        (np.array([1, 2]), ValueError, "takes boundaries that start at 0; got 1"),
        (np.array([0, 3, 2]), ValueError, "takes boundaries that do not decrease; got 3, then 2 at 2"),
        (np.array([0, 3, 2], np.uint8), ValueError, "takes boundaries that do not decrease"),
        (np.array([[0, 3]]), ValueError, "rank 1"),
        (np.array(0), ValueError, "rank 1"),
        (np.array([], int), ValueError, "at least one boundary"),
        (np.array([0.0, 3.0]), TypeError, "takes integers; got float64"),
        (np.array([False, True]), TypeError, "takes integers; got bool"),
    ],
)
def test_invalid_boundaries_are_refused(name, bounds, error, message):
    with pytest.raises(error, match=f"cu_seqlens: .*{message}"):
        getattr(packed, name)(bounds, **FUNCTIONS_OF_BOUNDARIES[name])


@pytest.mark.parametrize("name", ["prepare_chunk_offsets", "prepare_chunk_indices"])
@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_an_invalid_chunk_size_is_refused(name, size, error):
    with pytest.raises(error, match="chunk_size: "):
        getattr(packed, name)(np.array([0, 3]), size)


INVALID_CALLS = {
    "a total that is too small": (lambda: packed.prepare_position_ids([0, 3], total_length=2), ValueError, "total_length: takes an integer of at least 3 for these values; got 2"),
    "a total that is not an int": (lambda: packed.prepare_position_ids([0, 3], total_length=2.5), TypeError, "total_length: takes a static int"),
    "a total below 0": (lambda: packed.prepare_position_ids([0], total_length=-1), ValueError, "total_length: takes an integer of at least 0"),
    "too few chunks": (lambda: packed.prepare_chunk_indices([0, 3], 2, total_chunks=1), ValueError, "total_chunks: takes an integer of at least 2"),
    "no total under jit": (lambda: jax.jit(packed.prepare_position_ids)(jnp.array([0])), ValueError, "total_length: takes a static int where the values are traced"),
    "a traced total": (lambda: jax.jit(lambda n: packed.prepare_position_ids(np.array([0]), total_length=n))(3), TypeError, "total_length: takes a static int"),
    "no chunks under jit": (lambda: jax.jit(lambda b: packed.prepare_chunk_indices(b, 2))(jnp.array([0])), ValueError, "total_chunks: takes a static int where the values are traced"),
    "no number under jit": (lambda: jax.jit(packed.cu_seqlens_from_segment_ids)(jnp.array([0])), ValueError, "num_sequences: takes a static int where the values are traced"),
    "too few sequences": (lambda: packed.cu_seqlens_from_segment_ids([1, 2], num_sequences=1), ValueError, "num_sequences: takes an integer of at least 2"),
    "ids that decrease": (lambda: packed.cu_seqlens_from_segment_ids([2, 1]), ValueError, "segment_ids: takes ids that do not decrease"),
    "padding before tokens": (lambda: packed.cu_seqlens_from_segment_ids([1, 0, 2]), ValueError, "padding last"),
    "ids of rank 2": (lambda: packed.cu_seqlens_from_segment_ids(np.array([[1]])), ValueError, "segment_ids: takes rank 1"),
    "ids that are floats": (lambda: packed.cu_seqlens_from_segment_ids([1.0]), TypeError, "segment_ids: takes integers"),
    "another mask of floats": (lambda: packed.prepare_cu_seqlens_from_mask(np.ones((1, 2))), TypeError, "mask: takes booleans"),
    "a mask of complex numbers": (lambda: packed.prepare_lens_from_mask(np.ones((1, 2), complex)), TypeError, "mask: takes booleans"),
    "a mask of floats": (lambda: packed.prepare_lens_from_mask(np.ones((1, 2))), TypeError, "mask: takes booleans"),
    "a mask of 2": (lambda: packed.prepare_lens_from_mask(np.array([[0, 2]])), ValueError, "mask: .*got 0 to 2"),
    "a mask of rank 1": (lambda: packed.prepare_cu_seqlens_from_mask(np.ones(2, bool)), ValueError, "mask: takes \\(batch, length\\)"),
    "a dtype that counts nothing": (lambda: packed.prepare_cu_seqlens_from_mask(np.ones((1, 2), bool), np.float32), TypeError, "out_dtype"),
    "division by 0": (lambda: packed.cdiv(3, 0), ValueError, "b: takes integers of at least 1; got 0"),
    "division of floats": (lambda: packed.cdiv(3.0, 2), TypeError, "a: takes integers"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID_CALLS)
def test_invalid_arguments_are_refused(case):
    call, error, message = INVALID_CALLS[case]
    with pytest.raises(error, match=message):
        call()
