"""Lengths, boundaries, ids and chunks against straightforward NumPy, eagerly and under jit, in int32 and int64."""

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

#: Few shapes, because each of them compiles: four tokens cut into three sequences in every way, and a static total that
#: holds them. Other numbers of sequences and tokens are examples, in one dtype each.
TOTAL = 6
QUICK = settings(max_examples=30, deadline=None, derandomize=True)
LENGTHS = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda cuts: np.diff([0, *sorted(cuts), 4]).tolist())
WIDTHS = st.sampled_from([np.int32, np.int64])


def boundaries(lengths, dtype=np.int32):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)


def tokens(lengths):
    return [(number, place) for number, length in enumerate(lengths) for place in range(length)]


def chunks(lengths, size):
    return [(number, chunk) for number, length in enumerate(lengths) for chunk in range(-(-length // size))]


def padded(pairs, total):
    return np.array(pairs + [(-1, 0)] * (total - len(pairs))).reshape(-1, 2)


@contextlib.contextmanager
def width(dtype):
    with jax.enable_x64(dtype == np.int64):
        yield


def check(result, right, dtype):
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, right)


@functools.cache
def jitted(name, **static):
    return jax.jit(functools.partial(getattr(packed, name), **static))


@QUICK
@given(LENGTHS, WIDTHS)
@example([], np.int32)
@example([4], np.int32)
@example([0, 0, 0], np.int64)
@example([0, 4, 0], np.int32)
def test_tokens(lengths, dtype):
    with width(dtype):
        bounds = jnp.asarray(boundaries(lengths, dtype))
        right, some = np.array(tokens(lengths)).reshape(-1, 2), padded(tokens(lengths), TOTAL)
        check(packed.prepare_lens(bounds), lengths, dtype)
        check(jitted("prepare_lens")(bounds), lengths, dtype)
        for name, pick in {
            "prepare_sequence_ids": lambda pairs: pairs[:, 0],
            "segment_ids_from_cu_seqlens": lambda pairs: pairs[:, 0] + 1,
            "prepare_position_ids": lambda pairs: pairs[:, 1],
            "prepare_token_indices": lambda pairs: pairs,
        }.items():
            check(getattr(packed, name)(bounds), pick(right), dtype)
            check(getattr(packed, name)(bounds, total_length=TOTAL), pick(some), dtype)
            check(jitted(name, total_length=TOTAL)(bounds), pick(some), dtype)


@QUICK
@given(LENGTHS, st.sampled_from([1, 3]), WIDTHS)
@example([], 3, np.int32)
@example([4], 3, np.int32)
@example([0, 0, 0], 3, np.int64)
def test_chunks(lengths, chunk_size, dtype):
    with width(dtype):
        bounds = jnp.asarray(boundaries(lengths, dtype))
        counts = [-(-length // chunk_size) for length in lengths]
        right = chunks(lengths, chunk_size)
        check(packed.prepare_chunk_offsets(bounds, chunk_size), boundaries(counts), dtype)
        check(jitted("prepare_chunk_offsets", chunk_size=chunk_size)(bounds), boundaries(counts), dtype)
        check(packed.prepare_chunk_indices(bounds, chunk_size), padded(right, len(right)), dtype)
        static = {"chunk_size": chunk_size, "total_chunks": TOTAL}
        check(packed.prepare_chunk_indices(bounds, **static), padded(right, TOTAL), dtype)
        check(jitted("prepare_chunk_indices", **static)(bounds), padded(right, TOTAL), dtype)


@QUICK
@given(LENGTHS, st.sampled_from([0, 2]), WIDTHS)
@example([], 2, np.int32)
@example([4], 0, np.int32)
@example([0, 0, 0], 2, np.int64)
def test_segment_ids_give_the_boundaries_back(lengths, padding, dtype):
    with width(dtype):
        bounds = boundaries(lengths, dtype)
        ids = packed.segment_ids_from_cu_seqlens(bounds, total_length=int(bounds[-1]) + padding)
        own = np.trim_zeros(np.array([0, *lengths]), "b")[1:]
        check(packed.cu_seqlens_from_segment_ids(ids), boundaries(own), dtype)
        check(packed.cu_seqlens_from_segment_ids(ids, num_sequences=len(lengths)), bounds, dtype)
        some = packed.segment_ids_from_cu_seqlens(bounds, total_length=TOTAL)
        check(jitted("cu_seqlens_from_segment_ids", num_sequences=len(lengths))(some), bounds, dtype)


@QUICK
@given(
    st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=3, max_size=3),
    st.sampled_from([bool, np.int32, np.uint8]),
    WIDTHS,
)
@example([], bool, np.int32)
@example([[False] * 4] * 3, np.int32, np.int64)
def test_lengths_of_a_mask(rows, kind, dtype):
    with width(dtype):
        mask = np.array(rows).reshape(-1, 4).astype(kind)
        lengths = [sum(row) for row in rows]
        for way in (packed.prepare_lens_from_mask, jitted("prepare_lens_from_mask")):
            check(way(mask), lengths, np.int32)
        for way in (packed.prepare_cu_seqlens_from_mask, jitted("prepare_cu_seqlens_from_mask")):
            check(way(mask), boundaries(lengths), np.int32)
        check(packed.prepare_cu_seqlens_from_mask(mask, out_dtype=dtype), boundaries(lengths), dtype)


@QUICK
@given(st.integers(-9, 2**31 - 1), st.integers(1, 2**31 - 1))
@example(2**31 - 1, 2)
def test_cdiv(a, b):
    right = -(-a // b)
    assert packed.cdiv(a, b) == right
    assert type(packed.cdiv(a, b)) is int
    check(packed.cdiv(jnp.array([a]), b), [right], np.int32)
    check(jitted("cdiv")(jnp.array([a]), jnp.array([b])), [right], np.int32)


def test_cdiv_of_the_greatest_unsigned_number():
    check(packed.cdiv(jnp.uint32(2**32 - 1), jnp.uint32(2)), 2**31, np.uint32)


def test_small_dtypes_hold_many_sequences():
    bounds = np.zeros(401, np.uint8)
    bounds[-1] = 2
    check(packed.prepare_sequence_ids(bounds), [399, 399], np.int32)
    check(packed.prepare_sequence_ids(bounds, total_length=3), [399, 399, -1], np.int32)


def test_tokens_that_do_not_fit_are_left_out_under_jit():
    check(jitted("prepare_token_indices", total_length=3)(jnp.array([0, 2, 4])), [[0, 0], [0, 1], [1, 0]], np.int32)
    check(jitted("prepare_token_indices", total_length=0)(jnp.array([0, 2, 4])), np.zeros((0, 2)), np.int32)


def test_boundaries_known_while_tracing_need_no_total():
    bounds = jnp.array([0, 2, 3])
    check(jax.jit(lambda: packed.prepare_position_ids(bounds))(), [0, 1, 0], np.int32)


def test_wrong_boundaries_raise_nothing_under_jit():
    """What comes then has no meaning, but the size that was asked for."""
    for bounds in ([1, 2, 3], [0, 3, 1], [0, -1, 9]):
        for name, static in TRACED.items():
            assert jitted(name, **BOUNDED[name], **static)(jnp.array(bounds)).shape[0] == len(bounds) - 1


def test_a_traced_mask_of_integers_is_true_where_it_is_not_0():
    check(jitted("prepare_lens_from_mask")(jnp.array([[0, 2, -1]])), [2], np.int32)


BOUNDED = {
    "prepare_lens": {},
    "prepare_position_ids": {},
    "prepare_sequence_ids": {},
    "prepare_token_indices": {},
    "segment_ids_from_cu_seqlens": {},
    "prepare_chunk_offsets": {"chunk_size": 2},
    "prepare_chunk_indices": {"chunk_size": 2},
}


#: With the size that each of them is asked for under jit, here as many as there are sequences.
TRACED = {
    "prepare_lens": {},
    "prepare_position_ids": {"total_length": 2},
    "prepare_sequence_ids": {"total_length": 2},
    "prepare_token_indices": {"total_length": 2},
    "segment_ids_from_cu_seqlens": {"total_length": 2},
    "prepare_chunk_indices": {"total_chunks": 2},
}


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize(
    ("bounds", "error", "said"),
    [
        (np.array([1, 2]), ValueError, "starts at 0; got 1"),
        (np.array([0, 3, 2]), ValueError, "does not decrease; got 3, then 2 at 2"),
        (np.array([0, 3, 2], np.uint8), ValueError, "does not decrease"),
        (np.array([[0, 3]]), ValueError, "rank 1"),
        (np.array(0), ValueError, "rank 1"),
        (np.array([], int), ValueError, "at least one boundary"),
        (np.array([0.0, 3.0]), TypeError, "takes integers; got float64"),
        (np.array([False, True]), TypeError, "takes integers; got bool"),
    ],
)
def test_wrong_boundaries(name, bounds, error, said):
    with pytest.raises(error, match=f"cu_seqlens: .*{said}"):
        getattr(packed, name)(bounds, **BOUNDED[name])


@pytest.mark.parametrize("name", ["prepare_chunk_offsets", "prepare_chunk_indices"])
@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_wrong_chunk_size(name, size, error):
    with pytest.raises(error, match="chunk_size: "):
        getattr(packed, name)(np.array([0, 3]), size)


WRONG = {
    "a total that is too small": (lambda: packed.prepare_position_ids([0, 3], total_length=2), ValueError, "total_length: is at least 3"),
    "a total that is no int": (lambda: packed.prepare_position_ids([0, 3], total_length=2.5), TypeError, "total_length: takes a static int"),
    "a total below 0": (lambda: packed.prepare_position_ids([0], total_length=-1), ValueError, "total_length: is at least 0"),
    "too few chunks": (lambda: packed.prepare_chunk_indices([0, 3], 2, total_chunks=1), ValueError, "total_chunks: is at least 2"),
    "no total under jit": (lambda: jax.jit(packed.prepare_position_ids)(jnp.array([0])), ValueError, "total_length: has to be given"),
    "a traced total": (lambda: jax.jit(lambda n: packed.prepare_position_ids(np.array([0]), total_length=n))(3), TypeError, "total_length: takes a static int"),
    "no chunks under jit": (lambda: jax.jit(lambda b: packed.prepare_chunk_indices(b, 2))(jnp.array([0])), ValueError, "total_chunks: has to be given"),
    "no number under jit": (lambda: jax.jit(packed.cu_seqlens_from_segment_ids)(jnp.array([0])), ValueError, "num_sequences: has to be given"),
    "too few sequences": (lambda: packed.cu_seqlens_from_segment_ids([1, 2], num_sequences=1), ValueError, "num_sequences: is at least 2"),
    "ids that decrease": (lambda: packed.cu_seqlens_from_segment_ids([2, 1]), ValueError, "segment_ids: do not decrease"),
    "padding before tokens": (lambda: packed.cu_seqlens_from_segment_ids([1, 0, 2]), ValueError, "padding comes last"),
    "ids of rank 2": (lambda: packed.cu_seqlens_from_segment_ids(np.array([[1]])), ValueError, "segment_ids: takes rank 1"),
    "ids that are floats": (lambda: packed.cu_seqlens_from_segment_ids([1.0]), TypeError, "segment_ids: takes integers"),
    "another mask of floats": (lambda: packed.prepare_cu_seqlens_from_mask(np.ones((1, 2))), TypeError, "mask: takes booleans"),
    "a mask of complex numbers": (lambda: packed.prepare_lens_from_mask(np.ones((1, 2), complex)), TypeError, "mask: takes booleans"),
    "a mask of floats": (lambda: packed.prepare_lens_from_mask(np.ones((1, 2))), TypeError, "mask: takes booleans"),
    "a mask of 2": (lambda: packed.prepare_lens_from_mask(np.array([[0, 2]])), ValueError, "mask: .*got 0 to 2"),
    "a mask of rank 1": (lambda: packed.prepare_cu_seqlens_from_mask(np.ones(2, bool)), ValueError, "mask: takes \\(batch, length\\)"),
    "a dtype that counts nothing": (lambda: packed.prepare_cu_seqlens_from_mask(np.ones((1, 2), bool), np.float32), TypeError, "out_dtype"),
    "division by 0": (lambda: packed.cdiv(3, 0), ValueError, "b: is at least 1; got 0"),
    "division of floats": (lambda: packed.cdiv(3.0, 2), TypeError, "a: takes integers"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    call, error, said = WRONG[case]
    with pytest.raises(error, match=said):
        call()
