"""``ragged_paged_attention`` against NumPy in float64: values, tiles, layers, shards, and what is refused.

``EJKERNEL_RANDOM_CALLS=1000 pytest plugins/ops/tests/test_ragged_paged_attention.py -k more`` runs a thousand calls.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import NotDifferentiable
from ejkernel_ops import paged_attention_metadata, ragged_paged_attention, update_kv_pages
from ejkernel_ops.ragged_paged_attention.examples import CHANGES, DECODE, MIXED, SIZES, Sizes, changed, drawn
from ejkernel_ops.ragged_paged_attention.random_calls import as_dtype, check, expected
from ejkernel_ops.ragged_paged_attention.tiles import TILE_SIZES, list_tiles, metadata_length, tile_bound

COUNT = int(os.environ.get("EJKERNEL_RANDOM_CALLS", "100"))
BACKENDS = ("reference", "xla")
CALL = ejkernel_core.call
OP = "ragged_paged_attention"


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(40))
def test_random_calls(seed: int, backend: str) -> None:
    check(seed, backend=backend, dtype=("float32", "bfloat16", "float16")[seed % 3], most_keys=300)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(40, 40 + COUNT))
def test_more_random_calls(seed: int, backend: str) -> None:
    check(seed, backend=backend, dtype=("float32", "bfloat16", "float16")[seed % 3])


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_by_hand(backend: str) -> None:
    """Two keys with logits 0 and log(3): weights of a quarter and three quarters."""
    pages = np.full((3, 2, 2, 1), np.nan, np.float32)
    pages[2, :, 0, 0], pages[2, :, 1, 0] = (0.0, np.log(3.0)), (8.0, 4.0)
    given = (jnp.ones((1, 1, 1)), pages, np.array([2]), np.array([[2, -1]]), np.array([0, 1]))
    out, lse = ragged_paged_attention(*given, softmax_scale=1.0, return_lse=True, backend=backend)
    np.testing.assert_allclose(out, [[[5.0]]], rtol=1e-6)
    np.testing.assert_allclose(lse, [[np.log(4.0)]], rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_stands_behind_lengths_and_in_other_pages_changes_no_bit(backend: str) -> None:
    call = as_dtype(drawn(MIXED, 0), "float32")
    results = []
    for fill in (np.nan, 7.0):
        pages = jnp.where(jnp.isnan(call["kv_pages"]), fill, call["kv_pages"])
        results.append(np.asarray(CALL(OP, **call | {"kv_pages": pages}, backend=backend)).tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_has_the_same_bits_alone_and_among_others(backend: str) -> None:
    sizes = Sizes((1,) * 9, (300, 5, 129, 257, 1, 40, 1000, 128, 64), 16)
    call = as_dtype(drawn(sizes, 3), "float32") | {"split_size": 128, "max_query_len": 1}
    together = np.asarray(CALL(OP, **call, backend=backend))
    for place in (0, 3, 6):
        alone = {
            **call,
            "query": call["query"][place : place + 1],
            "kv_lens": call["kv_lens"][place : place + 1],
            "block_tables": call["block_tables"][place : place + 1],
            "query_start_loc": np.array([0, 1], np.int32),
        }
        assert np.asarray(CALL(OP, **alone, backend=backend))[0].tobytes() == together[place].tobytes()


def test_typed_function_takes_both_forms() -> None:
    call = as_dtype(drawn(MIXED, 1), "float32")
    rest = [call[name] for name in ("kv_lens", "block_tables", "query_start_loc")]
    pages = call["kv_pages"]
    joint = ragged_paged_attention(call["query"], pages, *rest)
    pair = ragged_paged_attention(call["query"], (pages[:, :, ::2], pages[:, :, 1::2]), *rest)
    np.testing.assert_allclose(joint, expected(call)[0], atol=2e-5)
    assert jnp.array_equal(joint, pair)


# -- the work of a step ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", TILE_SIZES)
@pytest.mark.parametrize("count", [None, 0, 2, 5])
def test_tiles_cover_each_token_once(size: int, count: int | None) -> None:
    starts = np.array([0, 5, 5, 12, 13, 40], np.int32)
    num_seqs = None if count is None else jnp.array([count])
    sequence, first = np.asarray(list_tiles(jnp.asarray(starts), num_seqs, 43, size))
    assert sequence.shape == (tile_bound(43, 5, size),)
    covered = []
    for own, token in zip(sequence, first, strict=True):
        if own >= 0:
            covered += [(own, place) for place in range(token, min(token + size, starts[own + 1]))]
    sequences = range(5 if count is None else count)
    assert covered == [(own, place) for own in sequences for place in range(starts[own], starts[own + 1])]
    assert (np.diff(sequence < 0) >= 0).all()


def test_metadata_is_the_same_for_all_layers_and_changes_nothing() -> None:
    call = as_dtype(drawn(MIXED, 2), "float32")
    tokens, sequences = call["query"].shape[0], len(call["kv_lens"])
    metadata = jax.jit(partial(paged_attention_metadata, num_tokens=tokens))(call["kv_lens"], call["query_start_loc"])
    assert metadata.shape == (metadata_length(tokens, sequences),)
    for backend in BACKENDS:
        alone = CALL(OP, **call, backend=backend)
        assert jnp.array_equal(alone, CALL(OP, **call, metadata=metadata, backend=backend))


@pytest.mark.parametrize(
    ("lengths", "starts", "tokens", "message"),
    [
        (np.ones(2), np.arange(3), 2, "kv_lens: takes integers; got float"),
        (np.ones((1, 2), int), np.arange(3), 2, r"kv_lens: takes \(sequences,\); got shape \(1, 2\)"),
        (np.ones(2, int), np.arange(3.0), 2, "query_start_loc: takes integers; got float"),
        (
            np.ones(2, int),
            np.arange(2),
            2,
            r"query_start_loc: takes \(sequences \+ 1,\) for the 2 of kv_lens; got .*2,",
        ),
        (np.ones(2, int), np.arange(3), -1, "num_tokens: takes an int of at least 0; got -1"),
        (np.ones(2, int), np.arange(3), 1.5, "num_tokens: takes an int of at least 0; got 1.5"),
    ],
)
def test_arguments_of_metadata_are_checked(lengths: Any, starts: Any, tokens: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        paged_attention_metadata(lengths, starts, num_tokens=tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def test_there_may_be_no_tokens(backend: str) -> None:
    call = {**as_dtype(drawn(DECODE, 0), "float32"), "backend": backend, "return_lse": True}
    call |= {"query": call["query"][:0], "query_start_loc": np.zeros_like(call["query_start_loc"])}
    shapes = jax.tree.map(jnp.shape, jax.jit(lambda: CALL(OP, **call))())
    assert shapes == ((0, *call["query"].shape[1:]), (call["query"].shape[1], 0))


def test_layers_of_a_scan_share_metadata() -> None:
    call = as_dtype(drawn(DECODE, 0), "float32")
    pool = jnp.concatenate([call["kv_pages"]] * 3)
    layer_pages = call["kv_pages"].shape[0]

    @jax.jit
    def step(query: Any, pool: Any, lengths: Any, starts: Any) -> Any:
        metadata = paged_attention_metadata(lengths, starts, num_tokens=4)

        def layer(query: Any, number: Any) -> Any:
            tables = {"kv_lens": lengths, "block_tables": call["block_tables"], "query_start_loc": starts}
            out = CALL(OP, query, pool, **tables, metadata=metadata, first_page=number * layer_pages)
            return out, None

        return jax.lax.scan(layer, query, jnp.arange(3))[0]

    actual = step(call["query"], pool, call["kv_lens"], call["query_start_loc"])
    right = call
    for _ in range(3):
        right = {**right, "query": expected(right)[0]}
    np.testing.assert_allclose(actual, right["query"], atol=1e-4)


# -- a cache that is updated -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decode_loop_attends_to_what_it_has_written(backend: str) -> None:
    """Six steps of two sequences, one of which begins a new page."""
    rng = np.random.default_rng(8)
    pages = jnp.full((7, 4, 4, 16), jnp.nan)
    tables = np.array([[3, 0, 5], [6, 1, 2]], np.int32)
    tokens = rng.normal(size=(6, 3, 2, 2, 16)).astype(np.float32)  # steps; query, key, value; sequences; heads; dim
    starts = np.array([0, 1, 2], np.int32)
    for step, (query, key, value) in enumerate(tokens):
        slots = tables[:, step // 4] * 4 + step % 4
        pages = update_kv_pages(key, value, pages, slots)
        out = ragged_paged_attention(query, pages, np.full(2, step + 1), tables, starts, backend=backend)
        for sequence in range(2):
            keys, values = tokens[: step + 1, 1, sequence], tokens[: step + 1, 2, sequence]
            for head in range(2):
                logits = keys[:, head] @ query[sequence, head] / 4
                weights = np.exp(logits) / np.exp(logits).sum()
                np.testing.assert_allclose(out[sequence, head], weights @ values[:, head], atol=1e-5)


# -- refusals --------------------------------------------------------------------------------------------------------

GIVEN = as_dtype(drawn(MIXED, 0), "float32")
PAGES = GIVEN["kv_pages"]
OTHER_METADATA = paged_attention_metadata(GIVEN["kv_lens"], GIVEN["query_start_loc"], 4, num_tokens=34)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kv_lens": None}, TypeError, "kv_lens: is missing"),
        ({"kv_lens": GIVEN["kv_lens"].astype(np.float32)}, TypeError, "kv_lens: takes integers; got float32"),
        ({"kv_lens": GIVEN["kv_lens"][None]}, ValueError, r"kv_lens: takes \(sequences,\); got shape \(1, 5\)"),
        ({"kv_lens": GIVEN["kv_lens"][:3]}, ValueError, "sequences"),
        ({"block_tables": GIVEN["block_tables"][0]}, ValueError, r"block_tables: takes \(sequences, pages\)"),
        ({"block_tables": GIVEN["block_tables"] > 0}, TypeError, "block_tables: takes integers; got bool"),
        ({"query_start_loc": GIVEN["query_start_loc"][:-1]}, ValueError, "query_start_loc"),
        ({"query": GIVEN["query"][None]}, ValueError, r"query: takes \(tokens, heads, head_dim\)"),
        ({"query": GIVEN["query"].astype(np.int32)}, TypeError, "query: takes float16, .*; got int32"),
        ({"query": GIVEN["query"].astype("bfloat16")}, TypeError, "kv_pages: takes the query's dtype, bfloat16, or"),
        ({"query": GIVEN["query"][:, :3]}, ValueError, "heads"),
        ({"block_tables": GIVEN["block_tables"][:, :0]}, ValueError, "block_tables: .* at least 1"),
        ({"kv_pages": PAGES[:0]}, ValueError, "kv_pages: .* at least 1"),
        ({"kv_pages": PAGES[0]}, ValueError, r"kv_pages: takes \(pages, page_size, 2 \* kv heads, head_dim\)"),
        ({"kv_pages": PAGES[:, :, :3]}, ValueError, "kv_pages"),
        ({"key_pages": PAGES[:, :, ::2]}, ValueError, "kv_pages: takes it alone, or key_pages and value_pages"),
        ({"kv_pages": None}, ValueError, "kv_pages: takes it alone, or key_pages and value_pages"),
        ({"k_scale": 0.5}, ValueError, "k_scale: is for pages of 8 bits; these are float32"),
        ({"q_scale": 0.5}, ValueError, "q_scale: is for queries of 8 bits; these are float32"),
        ({"metadata": np.zeros(7, np.int32)}, ValueError, "metadata: takes what paged_attention_metadata returns"),
        ({"max_query_len": 0}, ValueError, "max_query_len: takes a number from 1"),
        ({"split_size": 100}, ValueError, "split_size: takes a multiple of 128; got 100"),
        ({"num_seqs": np.zeros(2, np.int32)}, ValueError, r"num_seqs: takes one integer; got shape \(2,\)"),
        ({"causal": 1}, TypeError, "causal: takes True or False"),
        ({"alibi_slopes": 1}, TypeError, "attention over pages has no alibi"),
        ({"key": 1}, TypeError, "'kv_pages' takes the keys and values, into which update_kv_pages"),
        ({"distribution": 1}, TypeError, "'num_seqs' takes its last number"),
        ({"paged_kv_indices": 1}, TypeError, "'block_tables' takes the pages of each sequence in a row of its own"),
        ({"qq_bias": 1}, TypeError, "attention over pages has no bias"),
        ({"attention_mask": 1}, TypeError, "attention over pages has no mask of its own"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {**GIVEN, **changes}
    given = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(error, match=message):
        CALL(OP, **given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lens": np.array([17, 7, 5, 30, 41], np.int32)}, "kv_lens: sequence 4 has 41 keys; .* from 0 to 40"),
        ({"kv_lens": np.array([17, 6, 5, 30, 33], np.int32)}, "kv_lens: sequence 1 has 7 queries and 6 keys"),
        ({"query_start_loc": np.array([1, 1, 8, 8, 11, 31], np.int32)}, "query_start_loc: begins with 0; got 1"),
        ({"query_start_loc": np.array([0, 8, 1, 8, 11, 31], np.int32)}, "sequence 1 begins at 8 and ends at 1"),
        ({"query_start_loc": np.array([0, 1, 8, 8, 11, 35], np.int32)}, "ends at token 35, and there are 34"),
        ({"block_tables": np.full((5, 10), -1, np.int32)}, "block_tables: entry 0 of sequence 0 is page -1"),
        ({"first_page": 10**6}, "block_tables: entry 0 of sequence 0 is page 10000"),
        ({"num_seqs": 6}, "num_seqs: must be from 0 to 5; got 6"),
        ({"max_query_len": 19}, "max_query_len: is 19, and a sequence has 20 queries"),
        ({"metadata": OTHER_METADATA}, "metadata: is that of other starts or another number of sequences"),
    ],
)
def test_wrong_values_are_told(changes: dict[str, Any], message: str) -> None:
    CALL(OP, **GIVEN, validate=True)
    with pytest.raises(ValueError, match=message):
        CALL(OP, **{**GIVEN, **changes}, validate=True)


def test_there_are_no_gradients() -> None:
    with pytest.raises(NotDifferentiable, match=OP):
        jax.grad(lambda query: CALL(OP, **{**GIVEN, "query": query}).sum())(GIVEN["query"])


def test_pairs_are_for_the_typed_function() -> None:
    pair = (PAGES[:, :, ::2], PAGES[:, :, 1::2])
    with pytest.raises(
        TypeError, match=r"ejkernel_ops.ragged_paged_attention takes kv_pages=\(key_pages, value_pages\)"
    ):
        CALL(OP, **{**GIVEN, "kv_pages": pair})


def test_examples_say_what_they_hold() -> None:
    """Each kind of example is really of its kind."""
    assert set(SIZES["no-keys"].keys) == {0, 5}
    layer = changed(partial(drawn, MIXED), CHANGES["first-page"])(0)
    assert layer["kv_pages"].shape[0] == 3 * drawn(MIXED, 0)["kv_pages"].shape[0]
    shared = changed(partial(drawn, MIXED), CHANGES["shared-pages"])(0)["block_tables"]
    assert shared[3, 0] == shared[4, 0]
