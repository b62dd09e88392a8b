"""The tables: what is fetched, and what is not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops.flash_attention.tokens import band, tokens, visible
from ejkernel_pallas_tpu.flash_attention._problem import problem
from ejkernel_pallas_tpu.flash_attention._sight import FIRST, LAST, SEEN, WHOLE, is_set, meetings, passing, staying


def arguments(q_length=700, k_length=900, batch=1, **given):
    names = (
        *("bias", "attention_mask", "q_segment_ids", "kv_segment_ids", "cum_seqlens_q", "cum_seqlens_k"),
        *("softmax_aux", "sliding_window", "logits_soft_cap", "dropout_seed"),
    )
    query, key = (jax.ShapeDtypeStruct((batch, n, 2, 16), jnp.float32) for n in (q_length, k_length))
    made = dict.fromkeys(names) | {"causal": False, "softmax_scale": 1.0, "dropout_prob": 0.0}
    return made | {"query": query, "key": key, "value": key} | given


def runs(x):
    return jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 5, x), axis=1).astype(np.int32))


CASES = {
    "full": arguments(),
    "causal": arguments(causal=True),
    "causal, more queries": arguments(900, 300, causal=True),
    "window": arguments(sliding_window=(100, 50)),
    "narrow window": arguments(2000, 2000, sliding_window=(10, 0)),
    "window, causal": arguments(causal=True, sliding_window=(130, 9)),
    "segments": arguments(batch=2, q_segment_ids=runs((2, 700)), kv_segment_ids=runs((2, 900)), causal=True),
    "packed": arguments(
        cum_seqlens_q=jnp.array([0, 10, 300, 300, 650]), cum_seqlens_k=jnp.array([0, 250, 260, 700, 900]), causal=True
    ),
    "mask": arguments(attention_mask=jnp.arange(900)[None, None, None] > 300),
    "mask of all": arguments(attention_mask=jnp.arange(900) > jnp.arange(700)[None, None, :, None] + 300),
}


def tiles(a, p):
    """Who sees whom, by the operation's own definition: (batch, blocks, queries, blocks, keys)."""
    where, (left, right) = tokens(a), band(a["causal"], a["sliding_window"])
    seen = visible(jnp.asarray(where.q_position), jnp.asarray(where.k_position), where.groups, left, right)
    shape = (a["query"].shape[0], p.q_length, p.k_length)
    seen = np.broadcast_to(True if seen is None else np.asarray(seen), shape)
    if a["attention_mask"] is not None:
        seen = seen & np.asarray(a["attention_mask"].any(1))
    padded = np.zeros((shape[0], p.q_count * p.q_block, p.k_count * p.k_block), bool)
    padded[:, : p.q_length, : p.k_length] = seen
    return padded.reshape(shape[0], p.q_count, p.q_block, p.k_count, p.k_block)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("blocks", [(128, 128), (256, 128), (512, 512)])
@pytest.mark.parametrize("by_keys", [False, True])
def test_all_that_is_seen_is_fetched_and_little_else(name, blocks, by_keys):
    a = CASES[name]
    p = problem(a, *blocks)
    met = meetings(a, p)
    sight = met.from_keys() if by_keys else met.from_queries()
    seen = tiles(a, p)
    some, real = seen.any((2, 4)), (np.arange(p.q_count * p.q_block) < p.q_length).reshape(1, p.q_count, p.q_block)
    every = (seen | ~real[..., None, None]).all((2, 4))
    if by_keys:
        some, every = some.swapaxes(1, 2), every.swapaxes(1, 2)
    for batch in range(len(some)):
        word = words(sight, batch)
        block, other = staying(word), passing(word)
        for b in range(some.shape[1]):
            here = (block == b) & is_set(word, SEEN)
            needed, fetched = np.flatnonzero(some[batch, b]), np.asarray(other[here])
            assert {*needed} <= {*fetched}
            assert len({*fetched}) == len(fetched)
            assert every[batch, b, np.asarray(other[here & is_set(word, WHOLE)])].all()
            if name not in ("segments", "packed"):  # of those, the span between the lowest and the highest
                assert [*needed] == [*fetched]
            if sight.masked == "never":
                assert every[batch, b, fetched].all()


def words(sight, batch):
    return sight.table.reshape(sight.rows, sight.steps)[batch if sight.rows > 1 else 0]


@pytest.mark.parametrize("name", CASES)
def test_every_block_has_a_first_and_a_last_step(name):
    a = CASES[name]
    word = words(meetings(a, problem(a, 128, 128)).from_queries(), 0)
    block = np.asarray(staying(word))
    assert [*block] == sorted(block)
    assert {*block} == {*range(6 if a["query"].shape[1] == 700 else -(-a["query"].shape[1] // 128))}
    changes = np.r_[True, block[1:] != block[:-1]]
    assert [*np.asarray(is_set(word, FIRST))] == [*changes]
    assert [*np.asarray(is_set(word, LAST))] == [*changes[1:], True]


@pytest.mark.parametrize("name", CASES)
def test_a_plane_says_who_meets(name):
    """In the order of rows, what is to be there changes only where somebody is met."""
    a = CASES[name]
    p = problem(a, 128, 128)
    plane = meetings(a, p).everywhere()
    some = tiles(a, p).any((2, 4))
    for batch in range(plane.rows):
        for i in range(p.q_count):
            word = np.asarray([plane.word(plane.table, batch, i, j) for j in range(p.k_count)])
            met = (word & 1).astype(bool)
            assert (met | ~some[batch, i]).all()
            assert [*(word >> 1)[met]] == [*np.flatnonzero(met)]
            changed = np.flatnonzero((word >> 1)[1:] != (word >> 1)[:-1]) + 1
            assert met[changed].all()


def test_a_window_makes_a_short_grid():
    a = CASES["narrow window"]
    # Of 16 blocks, the first sees itself, and the others the one before them, too.
    assert meetings(a, problem(a, 128, 128)).from_queries().steps == 31
    assert meetings(a, problem(a, 128, 128)).from_keys().steps == 31


def test_nothing_to_mask_is_known_while_tracing():
    a = arguments(1024, 1024)
    assert meetings(a, problem(a, 256, 256)).from_queries().masked == "never"


def test_causality_makes_a_triangle():
    a = arguments(1024, 1024, causal=True)
    sight = meetings(a, problem(a, 128, 128)).from_queries()
    assert sight.steps == 36
    assert [(int(staying(w)), int(passing(w))) for w in sight.table[:4]] == [(0, 0), (1, 0), (1, 1), (2, 0)]


def test_where_nothing_is_seen_any_more_the_last_block_stays():
    a = CASES["segments"]
    for sight in (meetings(a, problem(a, 128, 128)).from_queries(), meetings(a, problem(a, 128, 128)).from_keys()):
        for batch in range(2):
            word = words(sight, batch)
            after = ~np.asarray(is_set(word, SEEN) | is_set(word, FIRST))
            assert after.any()
            assert (np.asarray(passing(word))[1:] == np.asarray(passing(word))[:-1])[after[1:]].all()
