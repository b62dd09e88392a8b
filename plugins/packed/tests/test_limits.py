"""What int32 cannot count is refused by name, and never wraps around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_packed as packed

FAR = 2**33
BOUNDS, FEW = np.array([0, FAR, FAR + 4]), np.array([0, 2, 5])
WRONG: dict[str, tuple[str, Callable[[], Any]]] = {
    "boundaries": ("cu_seqlens", lambda: packed.prepare_lens(BOUNDS)),
    "boundaries in a list": ("cu_seqlens", lambda: packed.prepare_lens([0, FAR])),
    "boundaries of uint32": ("cu_seqlens", lambda: packed.prepare_lens(np.array([0, 2**31], np.uint32))),
    "boundaries on the device": ("cu_seqlens", lambda: packed.prepare_lens(jnp.array([0, 2**31], jnp.uint32))),
    "boundaries of positions": ("cu_seqlens", lambda: packed.prepare_position_ids(BOUNDS)),
    "boundaries of segments": ("cu_seqlens", lambda: packed.segment_ids_from_cu_seqlens(BOUNDS, total_length=4)),
    "boundaries of chunks": ("cu_seqlens", lambda: packed.prepare_chunk_offsets(BOUNDS, 4)),
    "boundaries to unpack": ("cu_seqlens", lambda: packed.unpack(jnp.ones((5, 2)), BOUNDS)),
    "a total": ("total_length", lambda: packed.prepare_position_ids(FEW, total_length=FAR)),
    "a total to pack": ("total_length", lambda: packed.pack(np.ones((2, 3)), np.array([2, 1]), total_length=FAR)),
    "lengths": ("lengths", lambda: packed.pack(np.ones((2, 3)), np.array([2, FAR]))),
    "rows": ("max_length", lambda: packed.unpack(jnp.ones((5, 2)), FEW, max_length=2**30)),
    "segment ids": ("segment_ids", lambda: packed.cu_seqlens_from_segment_ids(np.array([1, FAR]))),
    "segment ids of a mask": ("segment_ids", lambda: packed.segment_ids_to_mask(np.array([FAR + 1, 1]))),
    "sequences": ("num_sequences", lambda: packed.cu_seqlens_from_segment_ids(FEW[1:], num_sequences=FAR)),
    "a chunk": ("chunk_size", lambda: packed.prepare_chunk_offsets(FEW, FAR)),
    "chunks": ("total_chunks", lambda: packed.prepare_chunk_indices(FEW, 4, total_chunks=FAR)),
    "a chunk of an array": ("chunk_size", lambda: packed.chunk_array(np.ones(4), FAR)),
    "what is divided": ("a", lambda: packed.cdiv(np.array([FAR]), 3)),
    "an int beside an array": ("a", lambda: packed.cdiv(2**70, jnp.array([3]))),
    "what divides": ("b", lambda: packed.cdiv(np.array([5]), FAR)),
    "a row": ("row_length", lambda: packed.pack_rows([3, 4], FAR)),
    "boundaries in eight bits": (
        "out_dtype",
        lambda: packed.prepare_cu_seqlens_from_mask(np.ones((2, 100), bool), np.int8),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_too_large_is_named(what: str) -> None:
    name, call = WRONG[what]
    with pytest.raises(ValueError, match=f"^{name}: takes what int(32|8) can count; got "):
        call()


def test_a_batch_of_too_many_places_is_named() -> None:
    padded, lengths = jax.ShapeDtypeStruct((2**16, 2**15), jnp.int8), jax.ShapeDtypeStruct((2**16,), jnp.int32)
    with pytest.raises(ValueError, match="padded: takes what int32 can count; got 2,147,483,648"):
        jax.eval_shape(lambda p, n: packed.pack(p, n, total_length=4), padded, lengths)


def test_the_last_that_can_be_counted() -> None:
    most = 2**31 - 1
    np.testing.assert_array_equal(packed.prepare_lens(np.array([0, most])), [most])
    assert packed.cdiv(np.array([most]), 2).tolist() == [2**30]


def test_wider_integers_count_more() -> None:
    with jax.enable_x64(True):
        np.testing.assert_array_equal(packed.prepare_lens(BOUNDS), [FAR, 4])
        assert packed.cdiv(np.array([FAR]), 2).tolist() == [2**32]
    assert packed.cdiv(2**70, 2) == 2**69
