"""Segment ids and masks compared with plain NumPy, eagerly and under jit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ejkernel_packed import _masks, mask_to_segment_ids, segment_ids_to_mask

SETTINGS = settings(max_examples=20, derandomize=True)
JITTED = functools.cache(lambda **static: jax.jit(functools.partial(mask_to_segment_ids, **static)))
#: Rows of more than one word, batches, heads, and empty shapes. Each shape is compiled.
SHAPES = [(5, 40), (2, 3, 4), (1, 2, 3, 4), (4, 0), (0, 4), (0, 3, 4), (2, 0, 3, 4)]


def ids_by_loops(mask):
    """Ids of rows by first appearance, and of columns by the first row that sees them, then by position."""
    if mask.ndim > 2:
        pairs = [ids_by_loops(part) for part in mask]
        shapes = (mask.shape[0], *mask.shape[1:-2])
        return tuple(np.array([pair[i] for pair in pairs], int).reshape(*shapes, mask.shape[i - 2]) for i in (0, 1))
    rows, columns = list(map(bytes, mask)), list(map(bytes, mask.T))
    in_order = sorted(range(len(columns)), key=lambda k: (list(mask[:, k]).index(True) if mask[:, k].any() else -1, k))
    return ids_in_order(rows, range(len(rows))), ids_in_order(columns, in_order)


def ids_in_order(rows, order):
    ids = {}
    for position in order:
        if any(rows[position]):
            ids.setdefault(rows[position], len(ids) + 1)
    return np.array([ids.get(row, -1) for row in rows], int)


def masks(shape, patterns):
    """Masks with few distinct rows, so that some are equal."""
    return st.integers(0, 2**32 - 1).map(lambda seed: random_mask(np.random.default_rng(seed), shape, patterns))


def random_mask(generator, shape, patterns):
    rows = generator.random((patterns, shape[-1])) < generator.choice([0.0, 0.3, 0.9])
    return rows[generator.integers(0, patterns, shape[:-1])]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ids_of_a_mask(shape):
    @SETTINGS
    @given(masks(shape, 3), st.sampled_from([bool, np.int32]))
    @example(np.zeros(shape, bool), np.int32)
    @example(np.ones(shape, bool), np.int32)
    def check(mask, dtype):
        expected = ids_by_loops(mask)
        for pair in (mask_to_segment_ids(mask.astype(dtype), per_head=True), JITTED(per_head=True)(mask)):
            for ids, expected_ids in zip(pair, expected, strict=True):
                assert ids.dtype == jnp.int32
                np.testing.assert_array_equal(ids, expected_ids)

    check()


@SETTINGS
@given(st.lists(st.integers(-1, 3), min_size=6, max_size=6), st.lists(st.integers(-1, 3), min_size=5, max_size=5))
@example([0] * 6, [-1] * 5)
@example([1, 1, 2, 2, 0, 0], [2, 2, 1, 1, 0])
def test_a_mask_of_segments_is_recovered_from_its_ids(queries, keys):
    mask = segment_ids_to_mask((jnp.array(queries), jnp.array(keys)))
    np.testing.assert_array_equal(segment_ids_to_mask(mask_to_segment_ids(mask)), mask)
    np.testing.assert_array_equal(segment_ids_to_mask(JITTED()(mask)), mask)


@SETTINGS
@given(st.lists(st.integers(0, 3), max_size=3))
def test_a_block_diagonal_mask_is_recovered_from_its_ids(lengths):
    ids = np.zeros(9, np.int32)
    ids[: sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    mask = (ids[:, None] == ids) & (ids > 0)
    queries, keys = mask_to_segment_ids(mask[None, None])
    np.testing.assert_array_equal(queries, keys)
    np.testing.assert_array_equal(segment_ids_to_mask((queries, keys))[0], mask)


def test_the_documented_mask():
    mask = np.array([[[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]])
    queries, keys = mask_to_segment_ids(mask)
    assert queries.tolist() == keys.tolist() == [[1, 2, 3, 4]]


def test_ids_of_a_mask_with_heads():
    mask = random_mask(np.random.default_rng(3), (2, 3, 3, 4), 3)
    same_for_all_heads = np.broadcast_to(mask[:, :1], mask.shape)
    with pytest.raises(ValueError, match="mask: is not the same for all heads"):
        mask_to_segment_ids(mask)
    for ids in (mask_to_segment_ids(same_for_all_heads), JITTED()(mask)):
        for ids_of_axis, expected in zip(ids, ids_by_loops(mask[:, 0]), strict=True):
            np.testing.assert_array_equal(ids_of_axis, expected)
    with pytest.raises(ValueError, match="mask: has no heads"):
        mask_to_segment_ids(np.ones((2, 0, 3, 4), bool))


def test_colliding_hashes_do_not_merge_rows(monkeypatch):
    """The hashes of all rows collide until the third attempt."""
    original_hashes = _masks._hashes

    def colliding_hashes(words, seed):
        return tuple(
            jnp.where(seed < 2, jnp.uint32(0), hash_of_words) for hash_of_words in original_hashes(words, seed)
        )

    monkeypatch.setattr(_masks, "_hashes", colliding_hashes)
    mask = random_mask(np.random.default_rng(0), (7, 33), 4)
    words = _masks._words(jnp.asarray(mask))
    rows = list(map(bytes, mask))
    assert _masks._first_equal(words).tolist() == [rows.index(row) for row in rows]


def test_words_have_every_bit():
    mask = random_mask(np.random.default_rng(1), (3, 70), 3)
    words = np.asarray(_masks._words(jnp.asarray(mask)))
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").astype(bool)
    np.testing.assert_array_equal(bits[:, :70], mask)
    assert words.shape == (3, 3)
    assert not bits[:, 70:].any()


@SETTINGS
@given(st.lists(st.integers(-1, 2), min_size=12, max_size=12), st.sampled_from([bool, np.float32, np.int32]))
def test_mask_of_ids(ids, dtype):
    queries, keys = np.array(ids[:4]).reshape(2, 2), np.array(ids[4:10]).reshape(2, 3)
    expected = [[[q == k and q > 0 for k in b] for q in a] for a, b in zip(queries, keys, strict=True)]
    mask_of_ids = functools.partial(segment_ids_to_mask, dtype=dtype, return_separate_masks=True)
    for results in (mask_of_ids((queries, keys)), jax.jit(mask_of_ids)((queries, keys))):
        for result, expected_mask in zip(results, (queries > 0, keys > 0, expected), strict=True):
            assert result.dtype == dtype
            np.testing.assert_array_equal(result, np.asarray(expected_mask, dtype))
    mask = segment_ids_to_mask(queries)
    np.testing.assert_array_equal(mask, segment_ids_to_mask((queries, queries)))
    assert mask.shape == (2, 2, 2)
    assert mask.dtype == bool


def test_mask_of_no_tokens():
    assert segment_ids_to_mask(np.zeros((0, 3), int)).shape == (0, 3, 3)
    assert segment_ids_to_mask((np.zeros((2, 0), int), np.zeros((2, 3), int))).shape == (2, 0, 3)


def test_ids_of_int64():
    with jax.enable_x64(True):
        ids = jnp.array([2**40, 2**40, 0, 1])
        assert segment_ids_to_mask(ids).tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
        assert [ids.dtype for ids in mask_to_segment_ids(np.ones((2, 3), np.int64))] == [jnp.int32] * 2


INVALID_CALLS = {
    "floats": (lambda: mask_to_segment_ids(np.ones((2, 2))), TypeError, "mask: takes booleans"),
    "floats under jit": (lambda: JITTED()(np.ones((2, 2))), TypeError, "mask: takes booleans"),
    "numbers": (lambda: mask_to_segment_ids(np.array([[-1]])), ValueError, "mask: .*got -1 to -1"),
    "rank 1": (lambda: mask_to_segment_ids(np.ones(3, bool)), ValueError, "mask: takes \\(Q, K\\)"),
    "rank 5": (lambda: mask_to_segment_ids(np.ones((1,) * 5, bool)), ValueError, "mask: takes \\(Q, K\\)"),
    "float ids": (lambda: segment_ids_to_mask(np.ones((1, 2))), TypeError, "segment_ids: takes integers"),
    "three": (lambda: segment_ids_to_mask((np.ones(1, int),) * 3), ValueError, "segment_ids: .*tuple of two; got 3"),
    "batches": (
        lambda: segment_ids_to_mask((np.ones((1, 2), int), np.ones((2, 2), int))),
        ValueError,
        "last axis alone",
    ),
    "a scalar": (lambda: segment_ids_to_mask(np.array(1)), ValueError, "segment_ids: takes shapes that differ"),
}


@pytest.mark.parametrize("case", INVALID_CALLS)
def test_invalid_arguments_are_refused(case):
    call, error, message = INVALID_CALLS[case]
    with pytest.raises(error, match=message):
        call()
