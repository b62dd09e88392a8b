"""Intervals, spans and block maps against masks of all pairs of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops.flash_attention import geometry

Arguments = Mapping[str, Any]

Q_BLOCK, K_BLOCK = 8, 16


def arguments(q_length: int, k_length: int, batch: int = 1, **options: Any) -> dict[str, Any]:
    query, key = (jax.ShapeDtypeStruct((batch, length, 2, 16), jnp.float32) for length in (q_length, k_length))
    absent = (
        *("cum_seqlens_q", "cum_seqlens_k", "q_segment_ids", "kv_segment_ids", "attention_mask", "sliding_window"),
        *("q_start", "kv_lengths", "kv_positions"),
    )
    return {"query": query, "key": key, "causal": False, **dict.fromkeys(absent), **options}


def packed(cum_seqlens_q: list[int], cum_seqlens_k: list[int], **options: Any) -> dict[str, Any]:
    """Packed sequences with three tokens of padding behind them."""
    bounds = {"cum_seqlens_q": jnp.array(cum_seqlens_q), "cum_seqlens_k": jnp.array(cum_seqlens_k)}
    return arguments(cum_seqlens_q[-1] + 3, cum_seqlens_k[-1] + 3, **bounds, **options)


CALLS = {
    "everything": arguments(40, 50),
    "whole blocks": arguments(32, 64),
    "one token": arguments(1, 1, causal=True),
    "causal": arguments(40, 40, causal=True),
    "causal, fewer queries than keys": arguments(13, 70, causal=True),
    "causal, more queries than keys": arguments(70, 13, causal=True),
    "window": arguments(70, 75, sliding_window=(9, 3)),
    "window of its own key": arguments(40, 40, sliding_window=(0, 0)),
    "window that is wider than the keys": arguments(40, 40, sliding_window=(80, 80)),
    "causal window": arguments(70, 90, causal=True, sliding_window=(20, 5)),
    "packed": packed([0, 5, 40, 61], [0, 30, 33, 80]),
    "packed, causal": packed([0, 5, 40, 61], [0, 30, 33, 80], causal=True),
    "packed, window": packed([0, 50, 61], [0, 60, 80], sliding_window=(7, 2)),
    "packed, empty sequences": packed([0, 0, 9, 9, 9, 40, 40], [0, 4, 4, 20, 20, 50, 50], causal=True),
}


def mask(call: Arguments) -> np.ndarray:
    """(queries, keys): the keys that each query sees by causality, window and packed sequences."""
    q_length, k_length = call["query"].shape[1], call["key"].shape[1]
    sees = np.zeros((q_length, k_length), bool)
    bounds = [(0, 0), (q_length, k_length)]
    if call["cum_seqlens_q"] is not None:
        bounds = list(zip(call["cum_seqlens_q"].tolist(), call["cum_seqlens_k"].tolist(), strict=True))
    for (q_start, k_start), (q_end, k_end) in itertools.pairwise(bounds):
        for query in range(q_start, q_end):
            own_key = k_end - (q_end - query)
            for key in range(k_start, k_end):
                is_behind = call["causal"] and key > own_key
                left, right = call["sliding_window"] or (k_length + q_length,) * 2
                sees[query, key] = not is_behind and own_key - left <= key <= own_key + right
    return sees


def tiles(sees: np.ndarray, fill_of_padded_queries: bool = False) -> np.ndarray:
    """(blocks of queries, queries, blocks of keys, keys); padded keys are never visible."""
    q_count, k_count = -(-sees.shape[0] // Q_BLOCK), -(-sees.shape[1] // K_BLOCK)
    padded = np.zeros((q_count * Q_BLOCK, k_count * K_BLOCK), bool)
    padded[sees.shape[0] :, : sees.shape[1]] = fill_of_padded_queries
    padded[: sees.shape[0], : sees.shape[1]] = sees
    return padded.reshape(q_count, Q_BLOCK, k_count, K_BLOCK)


def visible_and_full(sees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    visible = tiles(sees).any((1, 3))
    return visible, visible & tiles(sees, fill_of_padded_queries=True).all((1, 3))


def runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """The start and the end of the run in each row; (0, 0) if there is none."""
    places = [np.flatnonzero(row) for row in flags]
    return [(place[0], place[-1] + 1) if len(place) else (0, 0) for place in places]


@pytest.mark.parametrize("name", CALLS)
def test_intervals_are_the_runs_of_the_mask(name: str) -> None:
    sees = mask(CALLS[name])
    for (start, end), flags in (
        (geometry.key_intervals(CALLS[name]), sees),
        (geometry.query_intervals(CALLS[name]), sees.T),
    ):
        assert start.shape == end.shape == (len(flags),)
        assert [(int(s), int(e)) if s < e else (0, 0) for s, e in zip(start, end, strict=True)] == runs(flags)


@pytest.mark.parametrize("name", CALLS)
def test_intervals_are_known_while_tracing_unless_sequences_are_packed(name: str) -> None:
    library = np.ndarray if CALLS[name]["cum_seqlens_q"] is None else jax.Array
    for interval in (geometry.key_intervals(CALLS[name]), geometry.query_intervals(CALLS[name])):
        assert all(isinstance(x, library) and x.dtype == np.int32 for x in interval)


def test_boundaries_beyond_the_last_token_end_with_it() -> None:
    call = arguments(20, 20, cum_seqlens_q=jnp.array([0, 10, 30]), cum_seqlens_k=jnp.array([0, 10, 30]))
    for _, end in (geometry.key_intervals(call), geometry.query_intervals(call)):
        assert end.tolist() == [10] * 10 + [20] * 10


@pytest.mark.parametrize("name", CALLS)
def test_blocks_of_queries_and_keys_by_intervals(name: str) -> None:
    block_map = geometry.interval_map(CALLS[name], Q_BLOCK, K_BLOCK)
    visible, full = visible_and_full(mask(CALLS[name]))
    assert block_map.visible.shape == block_map.full.shape == (1, *visible.shape)
    if "empty" in name:  # all blocks between the first and the last visible key count as visible
        assert (np.asarray(block_map.visible)[0] >= visible).all()
    else:
        np.testing.assert_array_equal(block_map.visible[0], visible)
    np.testing.assert_array_equal(block_map.full[0], full)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_ranges_of_spans(name: str, is_transposed: bool) -> None:
    """They are those of the block map, computed without the map."""
    call, sees = CALLS[name], mask(CALLS[name])
    interval, blocks = geometry.key_intervals(call), (Q_BLOCK, K_BLOCK)
    if is_transposed:
        interval, blocks, sees = geometry.query_intervals(call), (K_BLOCK, Q_BLOCK), sees.T
    spans = geometry.spans(interval, blocks[0], sees.shape[1])
    count = geometry.block_count(sees.shape[1], blocks[1])
    from_map = np.asarray(spans.block_map(blocks[1], count).ranges()[0])
    for row, expected in zip(np.asarray(spans.ranges(blocks[1])), from_map, strict=True):
        first, full, full_end, end = row
        assert first <= full <= full_end <= end
        assert [*range(first, end)] == [*range(expected[0], expected[3])]
        assert [*range(full, full_end)] == [*range(expected[1], expected[2])]


def test_padding_that_is_masked_makes_its_block_partial() -> None:
    interval = geometry.key_intervals(arguments(12, 32))
    assert geometry.spans(interval, 8, 32).ranges(16).tolist() == [[0, 0, 2, 2], [0, 0, 2, 2]]
    assert geometry.spans(interval, 8, 32, is_padding_masked=True).ranges(16).tolist() == [[0, 0, 2, 2], [0, 0, 0, 2]]


@pytest.mark.parametrize("name", CALLS)
def test_the_transposed_map_is_that_of_the_query_intervals(name: str) -> None:
    """The full pairs differ: padded keys make a pair partial, padded queries do not."""
    call = CALLS[name]
    q_length = call["query"].shape[1]
    spans = geometry.spans(geometry.query_intervals(call), K_BLOCK, q_length)
    visible = np.asarray(spans.block_map(Q_BLOCK, geometry.block_count(q_length, Q_BLOCK)).visible)
    transposed = geometry.interval_map(call, Q_BLOCK, K_BLOCK).transpose()
    expected, full = (part.T for part in visible_and_full(mask(call)))
    np.testing.assert_array_equal(transposed.full[0], full)
    assert (visible[0] >= expected).all()
    assert (np.asarray(transposed.visible)[0] >= expected).all()
    if CALLS[name]["cum_seqlens_q"] is None:  # packed keys that no query sees may lie between others
        np.testing.assert_array_equal(visible, transposed.visible)


def segments(length: int, seed: int, is_sorted: bool) -> jax.Array:
    ids = np.random.default_rng(seed).integers(-1, 4, (2, length))
    ids[1, : length // 2] = 2
    return jnp.asarray(np.sort(ids, axis=1) if is_sorted else ids, jnp.int32)


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize(("q_length", "k_length"), [(40, 50), (32, 64), (3, 100)])
def test_blocks_by_segments(q_length: int, k_length: int, is_sorted: bool) -> None:
    ids, other_ids = segments(q_length, 0, is_sorted), segments(k_length, 1, is_sorted)
    block_map = geometry.segment_map(ids, other_ids, Q_BLOCK, K_BLOCK)
    for row in range(2):
        q_ids, k_ids = np.asarray(ids[row]), np.asarray(other_ids[row])
        sees = (q_ids[:, None] == k_ids[None]) & (q_ids[:, None] > 0)
        visible = tiles(sees).any((1, 3))
        assert (np.asarray(block_map.visible[row]) >= visible).all()
        assert (np.asarray(block_map.full[row]) == tiles(sees).all((1, 3))).all()
        for i, j in zip(*np.nonzero(np.asarray(block_map.visible[row]) & ~visible), strict=True):
            # Not visible, but there are ids on both sides whose ranges overlap.
            block, other = (x[x > 0] for x in (q_ids[i * Q_BLOCK :][:Q_BLOCK], k_ids[j * K_BLOCK :][:K_BLOCK]))
            assert max(block.min(), other.min()) <= min(block.max(), other.max())


@pytest.mark.parametrize("padding", [0, -1])
def test_blocks_of_padding_see_nothing(padding: int) -> None:
    ids = jnp.array([[1] * 16 + [padding] * 16])
    block_map = geometry.segment_map(ids, ids, 16, 16)
    for part in (block_map.visible, block_map.full):
        assert part.tolist() == [[[True, False], [False, False]]]


@pytest.mark.parametrize("shape", [(2, 3, 40, 50), (1, 1, 32, 64), (2, 1, 1, 50), (1, 3, 40, 1), (1, 1, 1, 1)])
def test_blocks_by_masks(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    flags = rng.random(shape) < rng.random(shape) ** 0.1
    flags[..., shape[2] // 2 :, shape[3] // 3 :] = True
    flags[..., : shape[2] // 4, :] = False
    block_map = geometry.mask_map(jnp.asarray(flags), Q_BLOCK, K_BLOCK)
    for row in range(shape[0]):
        for part, reduce, fill in ((block_map.visible, np.any, False), (block_map.full, np.all, True)):
            expected = reduce(flags[row], 0)
            for axis, block in enumerate((Q_BLOCK, K_BLOCK)):
                starts = range(0, expected.shape[axis], block)
                pieces = [np.take(expected, range(s, min(s + block, expected.shape[axis])), axis) for s in starts]
                expected = np.stack([reduce(piece, axis) for piece in pieces], axis)
            assert np.asarray(part[row]).tolist() == expected.tolist(), fill


def test_a_map_of_two_maps() -> None:
    """A pair of blocks is visible, or full, if it is in both."""
    causal = geometry.interval_map(arguments(64, 64, causal=True), Q_BLOCK, K_BLOCK)
    ids = jnp.repeat(jnp.array([1, 2]), 32)[None]
    both = causal & geometry.segment_map(ids, ids, Q_BLOCK, K_BLOCK)
    sees = mask(arguments(64, 64, causal=True)) & np.equal.outer(np.asarray(ids[0]), np.asarray(ids[0]))
    visible, full = visible_and_full(sees)
    np.testing.assert_array_equal(both.visible[0], visible)
    np.testing.assert_array_equal(both.full[0], full)


def test_ranges_of_maps() -> None:
    rng = np.random.default_rng(1)
    visible = rng.random((3, 50, 6)) < 0.5
    full = visible & (rng.random((3, 50, 6)) < 0.6)
    for row, sees, is_full in zip(
        geometry.BlockMap(visible, full).ranges().reshape(-1, 4),
        visible.reshape(-1, 6),
        full.reshape(-1, 6),
        strict=True,
    ):
        first, full_start, full_end, end = row
        assert [(first, end)] == (runs(sees[None]) if sees.any() else [(6, 6)])
        if is_full.any():
            assert full_start == is_full.argmax()
            assert is_full[full_start:full_end].all()
            assert full_end == end or not is_full[full_end]
        else:
            assert full_start == full_end == end
