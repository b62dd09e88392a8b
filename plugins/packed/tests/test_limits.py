"""Sizes that int32 cannot count are refused by name, and never wrap around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_packed as packed

TOO_LARGE = 2**33
BOUNDS, SMALL_BOUNDS = np.array([0, TOO_LARGE, TOO_LARGE + 4]), np.array([0, 2, 5])
TOO_LARGE_CALLS: dict[str, tuple[str, Callable[[], Any]]] = {
    "boundaries": ("cu_seqlens", lambda: packed.prepare_lens(BOUNDS)),
    "boundaries in a list": ("cu_seqlens", lambda: packed.prepare_lens([0, TOO_LARGE])),
    "boundaries of uint32": ("cu_seqlens", lambda: packed.prepare_lens(np.array([0, 2**31], np.uint32))),
    "boundaries on the device": ("cu_seqlens", lambda: packed.prepare_lens(jnp.array([0, 2**31], jnp.uint32))),
    "boundaries of positions": ("cu_seqlens", lambda: packed.prepare_position_ids(BOUNDS)),
    "boundaries of segments": ("cu_seqlens", lambda: packed.segment_ids_from_cu_seqlens(BOUNDS, total_length=4)),
    "boundaries of chunks": ("cu_seqlens", lambda: packed.prepare_chunk_offsets(BOUNDS, 4)),
    "boundaries to unpack": ("cu_seqlens", lambda: packed.unpack(jnp.ones((5, 2)), BOUNDS)),
    "a total": ("total_length", lambda: packed.prepare_position_ids(SMALL_BOUNDS, total_length=TOO_LARGE)),
    "a total to pack": ("total_length", lambda: packed.pack(np.ones((2, 3)), np.array([2, 1]), total_length=TOO_LARGE)),
    "lengths": ("lengths", lambda: packed.pack(np.ones((2, 3)), np.array([2, TOO_LARGE]))),
    "rows": ("max_length", lambda: packed.unpack(jnp.ones((5, 2)), SMALL_BOUNDS, max_length=2**30)),
    "segment ids": ("segment_ids", lambda: packed.cu_seqlens_from_segment_ids(np.array([1, TOO_LARGE]))),
    "segment ids of a mask": ("segment_ids", lambda: packed.segment_ids_to_mask(np.array([TOO_LARGE + 1, 1]))),
    "sequences": (
        "num_sequences",
        lambda: packed.cu_seqlens_from_segment_ids(SMALL_BOUNDS[1:], num_sequences=TOO_LARGE),
    ),
    "a chunk": ("chunk_size", lambda: packed.prepare_chunk_offsets(SMALL_BOUNDS, TOO_LARGE)),
    "chunks": ("total_chunks", lambda: packed.prepare_chunk_indices(SMALL_BOUNDS, 4, total_chunks=TOO_LARGE)),
    "a chunk of an array": ("chunk_size", lambda: packed.chunk_array(np.ones(4), TOO_LARGE)),
    "what is divided": ("a", lambda: packed.cdiv(np.array([TOO_LARGE]), 3)),
    "an int beside an array": ("a", lambda: packed.cdiv(2**70, jnp.array([3]))),
    "what divides": ("b", lambda: packed.cdiv(np.array([5]), TOO_LARGE)),
    "a row": ("row_length", lambda: packed.pack_rows([3, 4], TOO_LARGE)),
    "boundaries in eight bits": (
        "out_dtype",
        lambda: packed.prepare_cu_seqlens_from_mask(np.ones((2, 100), bool), np.int8),
    ),
}


@pytest.mark.parametrize("case", TOO_LARGE_CALLS)
def test_a_size_that_is_too_large_is_refused_by_name(case: str) -> None:
    name, call = TOO_LARGE_CALLS[case]
    with pytest.raises(ValueError, match=f"^{name}: takes what int(32|8) can count; got "):
        call()


def test_a_batch_with_too_many_entries_is_refused_by_name() -> None:
    padded, lengths = jax.ShapeDtypeStruct((2**16, 2**15), jnp.int8), jax.ShapeDtypeStruct((2**16,), jnp.int32)
    with pytest.raises(ValueError, match="padded: takes what int32 can count; got 2,147,483,648"):
        jax.eval_shape(lambda p, n: packed.pack(p, n, total_length=4), padded, lengths)


def test_the_largest_int32_is_counted() -> None:
    largest = 2**31 - 1
    np.testing.assert_array_equal(packed.prepare_lens(np.array([0, largest])), [largest])
    assert packed.cdiv(np.array([largest]), 2).tolist() == [2**30]


def test_wider_integers_count_more() -> None:
    with jax.enable_x64(True):
        np.testing.assert_array_equal(packed.prepare_lens(BOUNDS), [TOO_LARGE, 4])
        assert packed.cdiv(np.array([TOO_LARGE]), 2).tolist() == [2**32]
    assert packed.cdiv(2**70, 2) == 2**69
