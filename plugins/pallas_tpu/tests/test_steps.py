"""The tables of steps, which say which blocks are fetched."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops.flash_attention.positions import ring_positions
from ejkernel_ops.flash_attention.tokens import band, tokens, visible
from ejkernel_pallas_tpu.flash_attention._problem import problem
from ejkernel_pallas_tpu.flash_attention._steps import (
    FIRST,
    FULL,
    LAST,
    VISIBLE,
    inner_block,
    is_set,
    outer_block,
    pairs,
)


def arguments(q_length=700, k_length=900, batch=1, **options):
    names = (
        *("bias", "attention_mask", "q_segment_ids", "kv_segment_ids", "cum_seqlens_q", "cum_seqlens_k"),
        *("q_start", "kv_lengths", "kv_positions", "softmax_aux", "sliding_window", "logits_soft_cap", "dropout_seed"),
    )
    query, key = (jax.ShapeDtypeStruct((batch, n, 2, 16), jnp.float32) for n in (q_length, k_length))
    absent = dict.fromkeys(names) | {"causal": False, "softmax_scale": 1.0, "dropout_prob": 0.0}
    return absent | {"query": query, "key": key, "value": key} | options


def sorted_ids(shape):
    return jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 5, shape), axis=1).astype(np.int32))


CASES = {
    "full": arguments(),
    "causal": arguments(causal=True),
    "causal, more queries": arguments(900, 300, causal=True),
    "window": arguments(sliding_window=(100, 50)),
    "narrow window": arguments(2000, 2000, sliding_window=(10, 0)),
    "window, causal": arguments(causal=True, sliding_window=(130, 9)),
    "segments": arguments(
        batch=2, q_segment_ids=sorted_ids((2, 700)), kv_segment_ids=sorted_ids((2, 900)), causal=True
    ),
    "packed": arguments(
        cum_seqlens_q=jnp.array([0, 10, 300, 300, 650]), cum_seqlens_k=jnp.array([0, 250, 260, 700, 900]), causal=True
    ),
    "lengths": arguments(
        batch=3, causal=True, q_start=jnp.array([-560, 130, 900]), kv_lengths=jnp.array([140, 830, 0])
    ),
    "start": arguments(batch=2, sliding_window=(100, 50), q_start=jnp.array([-300, 250])),
    "ring": arguments(
        q_length=300,
        batch=2,
        causal=True,
        sliding_window=(180, 0),
        q_start=jnp.array([1500, 300]),
        kv_positions=ring_positions(jnp.array([1800, 600]), 900),
    ),
    "mask": arguments(attention_mask=jnp.arange(900)[None, None, None] > 300),
    "mask of queries and keys": arguments(attention_mask=jnp.arange(900) > jnp.arange(700)[None, None, :, None] + 300),
}


def tiles(a, p):
    """The visible keys of each query by the operation's definition: (batch, blocks, queries, blocks, keys)."""
    positions, (left, right) = tokens(a), band(a["causal"], a["sliding_window"])
    mask = visible(jnp.asarray(positions.q_position), jnp.asarray(positions.k_position), positions.groups, left, right)
    shape = (a["query"].shape[0], p.q_length, p.k_length)
    mask = np.broadcast_to(True if mask is None else np.asarray(mask), shape)
    if a["attention_mask"] is not None:
        mask = mask & np.asarray(a["attention_mask"].any(1))
    padded = np.zeros((shape[0], p.q_count * p.q_block, p.k_count * p.k_block), bool)
    padded[:, : p.q_length, : p.k_length] = mask
    return padded.reshape(shape[0], p.q_count, p.q_block, p.k_count, p.k_block)


def words(steps, batch):
    return steps.table.reshape(steps.rows, steps.count)[batch if steps.rows > 1 else 0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("blocks", [(128, 128), (256, 128), (512, 512)])
@pytest.mark.parametrize("has_keys_outside", [False, True])
def test_all_visible_blocks_are_fetched_and_few_others(name, blocks, has_keys_outside):
    a = CASES[name]
    p = problem(a, *blocks)
    steps = pairs(a, p).key_steps() if has_keys_outside else pairs(a, p).query_steps()
    mask = tiles(a, p)
    is_query = (np.arange(p.q_count * p.q_block) < p.q_length).reshape(1, p.q_count, p.q_block)
    is_visible, is_full = mask.any((2, 4)), (mask | ~is_query[..., None, None]).all((2, 4))
    if has_keys_outside:
        is_visible, is_full = is_visible.swapaxes(1, 2), is_full.swapaxes(1, 2)
    for batch in range(len(is_visible)):
        word = words(steps, batch)
        outer, inner = outer_block(word), np.asarray(inner_block(word))
        for block in range(is_visible.shape[1]):
            runs = np.asarray((outer == block) & is_set(word, VISIBLE))
            visible_blocks, fetched = np.flatnonzero(is_visible[batch, block]), inner[runs]
            assert {*visible_blocks} <= {*fetched}
            assert len({*fetched}) == len(fetched)
            assert is_full[batch, block, inner[runs & np.asarray(is_set(word, FULL))]].all()
            if name not in ("segments", "packed"):  # those fetch all blocks between the first and the last visible one
                assert [*visible_blocks] == [*fetched]
            if steps.masked == "never":
                assert is_full[batch, block, fetched].all()


@pytest.mark.parametrize("name", CASES)
def test_every_outer_block_has_a_first_and_a_last_step(name):
    a = CASES[name]
    word = words(pairs(a, problem(a, 128, 128)).query_steps(), 0)
    outer = np.asarray(outer_block(word))
    assert [*outer] == sorted(outer)
    assert {*outer} == {*range(-(-a["query"].shape[1] // 128))}
    changes = np.r_[True, outer[1:] != outer[:-1]]
    assert [*np.asarray(is_set(word, FIRST))] == [*changes]
    assert [*np.asarray(is_set(word, LAST))] == [*changes[1:], True]


@pytest.mark.parametrize("name", CASES)
def test_the_table_of_pairs(name):
    """Along a row, the block to fetch changes only where a pair is visible."""
    a = CASES[name]
    p = problem(a, 128, 128)
    table = pairs(a, p).table()
    is_visible = tiles(a, p).any((2, 4))
    for batch in range(table.rows):
        for i in range(p.q_count):
            word = np.asarray([table.word(table.table, batch, i, j) for j in range(p.k_count)])
            runs = (word & 1).astype(bool)
            assert (runs | ~is_visible[batch, i]).all()
            assert [*(word >> 1)[runs]] == [*np.flatnonzero(runs)]
            changes = np.flatnonzero((word >> 1)[1:] != (word >> 1)[:-1]) + 1
            assert runs[changes].all()


def test_a_window_makes_a_short_grid():
    a = CASES["narrow window"]
    # Of 16 blocks, the first sees itself, and the others also see the one before them.
    assert pairs(a, problem(a, 128, 128)).query_steps().count == 31
    assert pairs(a, problem(a, 128, 128)).key_steps().count == 31


def test_a_call_without_masks_is_known_while_tracing():
    a = arguments(1024, 1024)
    assert pairs(a, problem(a, 256, 256)).query_steps().masked == "never"


def test_causality_makes_a_triangle():
    a = arguments(1024, 1024, causal=True)
    steps = pairs(a, problem(a, 128, 128)).query_steps()
    assert steps.count == 36
    assert [(int(outer_block(w)), int(inner_block(w))) for w in steps.table[:4]] == [(0, 0), (1, 0), (1, 1), (2, 0)]


@pytest.mark.long
@pytest.mark.parametrize("name", ["segments", "lengths", "ring"])
def test_steps_that_are_not_visible_repeat_the_last_block(name):
    a = CASES[name]
    for steps in (pairs(a, problem(a, 128, 128)).query_steps(), pairs(a, problem(a, 128, 128)).key_steps()):
        for batch in range(2):
            word = words(steps, batch)
            is_idle = ~np.asarray(is_set(word, VISIBLE) | is_set(word, FIRST))
            assert is_idle.any()
            inner = np.asarray(inner_block(word))
            assert (inner[1:] == inner[:-1])[is_idle[1:]].all()
