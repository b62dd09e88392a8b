"""The tables: what is fetched, and what is not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops.attention.tokens import band, tokens, visible
from ejkernel_pallas_tpu._problem import problem
from ejkernel_pallas_tpu._sight import meetings


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
    table = np.asarray(sight.table).reshape(sight.rows, sight.blocks, 4)
    for batch in range(len(some)):
        for block in range(sight.blocks):
            first, count, whole, whole_end = table[batch if sight.rows > 1 else 0, block]
            needed = np.flatnonzero(some[batch, block])
            fetched = range(first, first + count)
            assert {*needed} <= {*fetched}
            assert count <= sight.steps
            assert every[batch, block, whole:whole_end].all()
            if len(needed) and name not in ("segments", "packed"):  # of those, a hull
                assert (first, first + count) == (needed[0], needed[-1] + 1)
            if sight.masked == "never":
                assert every[batch, block, list(fetched)].all()


def test_a_window_makes_a_short_grid():
    a = CASES["narrow window"]
    assert meetings(a, problem(a, 128, 128)).from_queries().steps == 2
    assert meetings(a, problem(a, 128, 128)).from_keys().steps == 2


def test_nothing_to_mask_is_known_while_tracing():
    a = arguments(1024, 1024)
    assert meetings(a, problem(a, 256, 256)).from_queries().masked == "never"


@pytest.mark.parametrize("name", CASES)
def test_behind_the_last_block_the_last_one_stays(name):
    a = CASES[name]
    sight = meetings(a, problem(a, 128, 128)).from_queries()
    table = np.asarray(sight.table).reshape(sight.rows, sight.blocks, 4)
    for block in range(sight.blocks):
        first, count = table[0, block, :2]
        places = [int(sight.place(sight.table, 0, block, step)) for step in range(sight.steps)]
        assert places == [first + min(step, max(count - 1, 0)) for step in range(sight.steps)]
