"""The kernels for Hopper, without a GPU: what tiles see, which program has which tiles, soft caps, refusals."""

from __future__ import annotations

import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import Invocation, Registry, Unsupported
from ejkernel_ops.flash_attention.positions import ring_positions
from ejkernel_ops.flash_attention.tokens import band, tokens, visible
from ejkernel_triton import flash_attention_sm90 as flash_attention
from ejkernel_triton.flash_attention._problem import column_arrays, row_arrays, sides
from ejkernel_triton.flash_attention_sm90 import backward as flash_attention_bwd
from ejkernel_triton.flash_attention_sm90._launch import width
from ejkernel_triton.flash_attention_sm90._ranges import key_ranges, query_ranges
from ejkernel_triton.flash_attention_sm90._schedule import schedule
from ejkernel_triton.interpreter import _ptx, compiled_for
from ejkernel_triton.launch import _jax_triton, _protocol

FORWARD, BACKWARD = "flash_attention", "flash_attention_bwd"
H200 = "NVIDIA H200"

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

ABSENT = (
    *("cum_seqlens_q", "cum_seqlens_k", "q_segment_ids", "kv_segment_ids"),
    *("q_start", "kv_lengths", "kv_positions"),
)

KINDS = ("band", "packed", "segments", "lengths", "ring")

# -- what tiles see -----------------------------------------------------------------------------------------------


def random_call(rng: np.random.Generator, kind: str) -> dict[str, Any]:
    """The arguments of a call of few tokens."""
    q_length, k_length = (int(n) for n in rng.integers(1, 500, 2))
    batch = 1 if kind == "packed" else int(rng.integers(1, 3))
    call: dict[str, Any] = {
        "query": np.zeros((batch, q_length, 2, 16)),
        "key": np.zeros((batch, k_length, 2, 16)),
        "causal": bool(rng.random() < 0.5),
        "sliding_window": None if rng.random() < 0.5 else tuple(int(n) for n in rng.integers(0, 200, 2)),
        **dict.fromkeys(ABSENT),
    }
    if kind == "packed":
        count = int(rng.integers(1, 5))
        for name, length in (("cum_seqlens_q", q_length), ("cum_seqlens_k", k_length)):
            call[name] = jnp.asarray(np.sort([0, *rng.integers(0, length + 1, count)]), jnp.int32)
    if kind == "segments":
        for name, length in (("q_segment_ids", q_length), ("kv_segment_ids", k_length)):
            call[name] = jnp.asarray(np.sort(rng.integers(-1, 4, (batch, length)), 1), jnp.int32)
    if kind in ("lengths", "ring"):
        call["q_start"] = jnp.asarray(rng.integers(-60, k_length + 60, batch), jnp.int32)
    if kind == "lengths":
        call["kv_lengths"] = jnp.asarray(rng.integers(0, k_length + 1, batch), jnp.int32)
    if kind == "ring":
        call["kv_positions"] = jnp.asarray(ring_positions(rng.integers(0, 3 * k_length, batch), k_length))
    return call


def visible_pairs(call: dict[str, Any]) -> np.ndarray:
    """(batch, queries, keys), by the operation's own rule."""
    where = tokens(call)
    mask = visible(where.q_position, where.k_position, where.groups, *band(call["causal"], call["sliding_window"]))
    shape = (call["query"].shape[0], call["query"].shape[1], call["key"].shape[1])
    return np.ones(shape, bool) if mask is None else np.broadcast_to(np.asarray(mask), shape)


def is_full_block(own_rows: np.ndarray, n: int, other_block: int, may_have_padding: bool) -> bool:
    others = own_rows[:, n * other_block : (n + 1) * other_block]
    return (may_have_padding or others.shape[1] == other_block) and bool(others.all())


def check_ranges(
    ranges: Any, pairs: np.ndarray, block: int, other_block: int, is_exact: bool, padded: str | None = None
) -> None:
    """``padded``: of which tokens a full block may have padding, "own" or "other"."""
    for batch, rows in enumerate(pairs):
        for i, (first, full, full_end, end) in enumerate(np.asarray(ranges)[batch if len(ranges) > 1 else 0]):
            assert first <= full <= full_end <= end
            own_rows = rows[i * block : (i + 1) * block]
            others = np.flatnonzero(own_rows.any(0))
            if len(others):
                # With segments the range may have more blocks, because the tokens of a block see different ones.
                assert first <= others[0] // other_block
                assert others[-1] // other_block < end
                if is_exact:
                    assert (first, end) == (others[0] // other_block, others[-1] // other_block + 1)
            if is_exact and len(own_rows) == block:
                # Bands and packed sequences have contiguous full blocks.
                full_blocks = [n for n in range(end) if is_full_block(own_rows, n, other_block, padded == "other")]
                assert full_end - full == len(full_blocks)
            inside = own_rows[:, full * other_block : full_end * other_block]
            assert inside.shape[1] == (full_end - full) * other_block or padded == "other"
            assert inside.all()
            assert full == full_end or len(own_rows) == block or padded == "own"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 30))])
def test_tiles_see_all_that_their_tokens_see(kind: str, seed: int) -> None:
    call = random_call(np.random.default_rng(seed), kind)
    pairs = visible_pairs(call)
    for block, other_block in ((128, 64), (64, 128)):
        is_exact = kind in ("band", "packed", "lengths")
        # With positions queries that are padding count as seen: their results are not stored, and their weights are 0.
        padded = ("own", "other") if call["q_start"] is not None else (None, None)
        pairs_of_keys = pairs.swapaxes(1, 2)
        check_ranges(key_ranges(call, block, other_block)[0], pairs, block, other_block, is_exact, padded[0])
        check_ranges(query_ranges(call, block, other_block)[0], pairs_of_keys, block, other_block, is_exact, padded[1])


class Array(np.ndarray[Any, Any]):
    """An array with the methods of device code."""

    def to(self, dtype: Any) -> Array:
        return self.astype(dtype)


class Pointer:
    """To the first number of an array, or to several."""

    def __init__(self, array: np.ndarray, at: Any = 0) -> None:
        self.array, self.at = array, at

    def __add__(self, by: Any) -> Pointer:
        return Pointer(self.array, self.at + by)

    def load(self, mask: Any = True, other: int = 0) -> np.ndarray:
        return np.where(mask, self.array.ravel()[np.where(mask, self.at, 0)], other)


def run_in_numpy(function: Any, **functions: Any) -> Any:
    """A device function that runs with NumPy. ``functions`` are those that it calls."""

    def numpy_operation(operation: Any) -> Any:
        return lambda *values, **named: np.asarray(operation(*values, **named)).view(Array)

    names = SimpleNamespace(
        arange=numpy_operation(lambda first, end, layout: np.arange(first, end, dtype=np.int32)),
        full=numpy_operation(lambda shape, value, dtype, layout: np.full(shape, value, dtype)),
        load=numpy_operation(lambda pointer, **where: pointer.load(**where)),
        where=numpy_operation(np.where),
        minimum=numpy_operation(np.minimum),
        maximum=numpy_operation(np.maximum),
        SliceLayout=lambda dim, parent: None,
        int1=bool,
        uint32=np.uint32,
    )
    aggregates = {
        "OwnTokens": lambda *values: SimpleNamespace(
            **dict(zip(("index", "start", "stop", "ids"), values, strict=True))
        )
    }
    return types.FunctionType(function.fn.__code__, {"gl": names, **aggregates, **functions})


def kernel_masks(
    call: dict[str, Any], of_queries: bool, ends: bool, block: int, other_block: int
) -> Iterator[np.ndarray]:
    """For each batch, all pairs of blocks as the kernels mask them: of queries forward, of keys backward."""
    with _jax_triton.import_lock():
        from ejkernel_triton.flash_attention_sm90 import _shared
    key_count = run_in_numpy(_shared.key_count)
    key_places = run_in_numpy(_shared.key_places, key_count=key_count)
    cache = {"key_count": key_count, "key_places": key_places}
    own_tokens, is_visible = (run_in_numpy(f, **cache) for f in (_shared.own_tokens, _shared.is_visible))
    before, after = sides(call)
    names = [("query", "q_segment_ids"), ("key", "kv_segment_ids")]
    (own, own_ids), (other, other_ids) = names if of_queries else names[::-1]
    length, other_length = call[own].shape[1], call[other].shape[1]
    packed, segments = call["cum_seqlens_q"] is not None, call["q_segment_ids"] is not None
    arrays = (row_arrays if of_queries else column_arrays)(call)
    limits = [np.zeros(1, np.int32) if x is None else np.asarray(x) for x in arrays]
    for batch in range(call[own].shape[0]):
        call_fields = SimpleNamespace(
            own_length=length,
            other_length=other_length,
            PACKED=packed,
            SEGMENTS=segments,
            LEFT=before if of_queries else after,
            RIGHT=after if of_queries else before,
            START=call["q_start"] is not None,
            LENGTHS=call["kv_lengths"] is not None,
            SLOTS=call["kv_positions"] is not None,
            OWN_QUERIES=of_queries,
            COMPARE_STOP=ends or call["q_start"] is not None,
            starts=Pointer(limits[0]),
            stops=Pointer(limits[1]),
            own_ids=Pointer(np.asarray(call[own_ids])),
            other_ids=Pointer(np.asarray(call[other_ids])),
        )
        rows = []
        for first in range(0, length, block):
            tokens = own_tokens(call_fields, batch, first, block, None)
            firsts = range(0, other_length, other_block)
            rows.append(
                np.concatenate([is_visible(call_fields, tokens, batch, at, other_block, None) for at in firsts], 1)
            )
        yield np.concatenate(rows)


@pytest.mark.parametrize(
    ("of_queries", "ends"),
    [(True, True), (False, False), (False, True)],
    ids=["queries", "keys", "keys with a soft cap"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_masks_show_the_pairs_that_see_each_other(kind: str, of_queries: bool, ends: bool) -> None:
    for seed in range(8):
        call = random_call(np.random.default_rng(seed), kind)
        for batch, mask in enumerate(kernel_masks(call, of_queries, ends, 128, 64)):
            pairs = visible_pairs(call)[batch]
            expected = np.zeros_like(mask)
            expected[: pairs.shape[not of_queries], : pairs.shape[of_queries]] = pairs if of_queries else pairs.T
            if kind == "ring" and of_queries:  # padding has no results
                mask[pairs.shape[0] :] = False
            np.testing.assert_array_equal(mask, expected)


def test_only_blocks_on_the_diagonal_of_a_causal_call_are_partial() -> None:
    shape = np.zeros((1, 1024, 1, 64))
    call = {"query": shape, "key": shape, "causal": True, "sliding_window": None}
    call |= dict.fromkeys(ABSENT)
    assert key_ranges(call, 128, 128)[0][0].tolist() == [[0, 0, i, i + 1] for i in range(8)]
    assert query_ranges(call, 128, 64)[0][0].tolist() == [[2 * i, 2 * i + 2, 16, 16] for i in range(8)]


def test_every_tile_of_a_long_call_has_a_first_block() -> None:
    # Each group reads a first block without a check, and would wait forever if it were not fetched.
    shape = np.zeros((1, 16384, 1, 1))
    call = {"query": shape, "key": shape, "causal": True, "sliding_window": (4095, 0)}
    call |= dict.fromkeys(ABSENT)
    first, full, full_end, end = np.asarray(key_ranges(call, 128, 128)[0][0]).T
    tiles = np.arange(128)
    np.testing.assert_array_equal(end, tiles + 1)
    np.testing.assert_array_equal(first, np.maximum(tiles - 32, 0))
    np.testing.assert_array_equal((full, full_end), (np.where(tiles >= 32, tiles - 31, 0), tiles))
    bounds = jnp.asarray([0, 0, 1, 5000, 5000, 5120, 9000, 16000], jnp.int32)  # the last tokens are of no sequence
    packed = {**call, "sliding_window": None, "cum_seqlens_q": bounds, "cum_seqlens_k": bounds}
    first, *_, end = np.asarray(key_ranges(packed, 128, 128)[0][0]).T
    assert (first < end).all()
    assert (first[126:].tolist(), end[126:].tolist()) == ([128, 128], [129, 129])


# -- which program has which tiles ---------------------------------------------------------------------------------------------

CAUSAL = tuple(range(1, 17))


@pytest.mark.parametrize("steps", [CAUSAL, (16,) * 16, (1,), (0, 3, 0)])
@pytest.mark.parametrize("rows", [1, 3, 16, 128])
def test_every_tile_is_assigned_once_and_programs_end_together(rows: int, steps: tuple[int, ...]) -> None:
    table = schedule(rows, steps, row_bytes=4 << 20)
    tiles_of_programs = [row[1 : 1 + row[0]] for row in table]
    assert sorted(np.concatenate(tiles_of_programs)) == list(range(rows * len(steps)))
    assert len(table) == min(132, rows * len(steps))
    work = [sum(steps[tile % len(steps)] + 1 for tile in tiles) for tiles in tiles_of_programs]
    # The last program started its last tile when no other program was idle.
    assert max(work) <= sum(work) / len(work) + max(steps) + 1


@pytest.mark.parametrize(("rows", "blocks"), [(16, 128), (6, 50), (3, 45), (1, 7)])
def test_tiles_of_unknown_lengths_are_assigned_once_and_programs_end_together(rows: int, blocks: int) -> None:
    steps = np.random.default_rng(blocks).integers(0, 20, blocks)
    table = np.asarray(jax.jit(lambda steps: schedule(rows, steps, row_bytes=4 << 20))(jnp.asarray(steps)))
    tiles_of_programs = [row[1 : 1 + row[0]] for row in table]
    assert sorted(np.concatenate(tiles_of_programs)) == list(range(rows * blocks))
    assert table.shape == (min(132, rows * blocks), 1 + -(-rows * blocks // 132))
    lengths = [steps[tiles % blocks] + 1 for tiles in tiles_of_programs]
    work = [sum(tiles) for tiles in lengths]
    assert max(work) <= (1.02 * np.mean(work) if blocks == 128 else np.mean(work) + steps.max() + 1)
    # From the longest to the shortest.
    assert all((np.diff(tiles) <= 0).all() for tiles in lengths)


def test_tiles_of_few_long_packed_heads_run_at_a_time() -> None:
    steps = np.random.default_rng(0).integers(0, 30, 128)
    table = np.asarray(schedule(16, jnp.asarray(steps), row_bytes=16 << 20))
    # At any time tiles of four heads run, 33 of each.
    assert [len({*(tiles // 128)}) for tiles in table[:, 1:13].T] == [4] * 12
    work = [sum(steps[tile % 128] + 1 for tile in row[1 : 1 + row[0]]) for row in table]
    assert max(work) <= 1.06 * np.mean(work)
    # All tiles of one rank, of any head, come before those of the next rank.
    ranks = np.argsort(np.argsort(-steps, kind="stable"))[table[:, 1:-1] % 128] // 33
    assert (np.diff(ranks, axis=1) >= 0).all()


@pytest.mark.parametrize(("rows", "blocks", "mebibytes"), [(16, 128, 16), (8, 128, 64), (8, 64, 32), (8, 256, 128)])
def test_programs_have_equal_work_when_few_packed_heads_fit_the_cache(rows: int, blocks: int, mebibytes: int) -> None:
    steps = np.random.default_rng(blocks).integers(0, 60, blocks)
    table = np.asarray(schedule(rows, jnp.asarray(steps), row_bytes=mebibytes << 20))
    tiles_of_programs = [row[1 : 1 + row[0]] for row in table]
    assert sorted(np.concatenate(tiles_of_programs)) == list(range(rows * blocks))
    work = [sum(steps[tiles % blocks] + 1) for tiles in tiles_of_programs]
    assert max(work) <= 1.12 * np.mean(work)


def test_packed_heads_that_share_keys_run_together() -> None:
    table = np.asarray(schedule(40, jnp.arange(128), row_bytes=32 << 20, group=8))
    assert {*(table[:, 1] // 128)} == {*range(16)}


@pytest.mark.long
def test_steps_of_packed_tiles_are_the_blocks_that_they_see() -> None:
    call = random_call(np.random.default_rng(1), "packed")
    for ranges, steps in (key_ranges(call, 64, 64), query_ranges(call, 64, 64)):
        assert len(set(np.asarray(steps).tolist())) > 1
        # A tile that sees nothing has one step in the forward pass, and none in the backward.
        assert ((ranges[0, :, 3] - ranges[0, :, 0] == steps) | (steps == 0)).all()


@pytest.mark.parametrize(
    ("rows", "blocks", "row_mib", "group", "at_once"),
    [
        (64, 32, 4, 1, 16),
        (16, 128, 16, 1, 4),
        (16, 256, 32, 1, 2),
        (16, 64, 32, 1, 4),  # two would have to be five for equal work
        (8, 64, 64, 1, 4),
        (64, 64, 4, 4, 64),
        (2, 1024, 128, 1, 1),
    ],
)
def test_few_long_heads_run_at_a_time_and_programs_end_together(
    rows: int, blocks: int, row_mib: int, group: int, at_once: int
) -> None:
    table = schedule(rows, tuple(range(1, blocks + 1)), row_mib << 20, group)
    work = [sum(tile % blocks + 2 for tile in row[1 : 1 + row[0]]) for row in table]
    assert max(work) <= 1.01 * sum(work) / len(work)
    longest = (tile // blocks for tile in table[:, 1] if tile % blocks == blocks - 1)
    assert {*longest} >= {*range(at_once)}
    # No program begins with the longest tile of a head of the next part.
    assert len({tile // blocks for tile in table[:, 1]} - {*range(at_once)}) <= max(1, 132 // blocks)


def test_as_many_heads_as_the_cache_holds_run_first() -> None:
    table = schedule(72, CAUSAL, row_bytes=1 << 20)
    assert {tile // 16 for tile in table[:, 1]} == set(range(24))
    # The longest blocks of those heads, then the next longest.
    assert sorted(tile % 16 for tile in table[:, 1])[-24:] == [15] * 24
    with_group = schedule(96, CAUSAL, row_bytes=1 << 20, group=2)
    assert {tile // 16 for tile in with_group[:, 1]} == set(range(48))


# -- soft caps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1 / 8 / 30, 1 / 8 / 5])
@pytest.mark.parametrize("large_logit", [None, 0.352, -3])  # one number of one thread is enough
def test_weights_with_a_soft_cap_are_right_near_zero_and_far_from_it(scale: float, large_logit: float | None) -> None:
    with _jax_triton.import_lock():
        from ejkernel_triton.flash_attention_sm90 import _shared
    code, kinds = _shared._soft_cap_weights_ptx.fn(scale, 40.0, 64)
    assert kinds.count("=&f") == kinds.count("f") - 64 == 64
    logits = np.random.default_rng(0).uniform(-0.349, 0.349, (64, 32)).astype(np.float32)
    logits[5] = 0
    has_large_logit = large_logit is not None
    if has_large_logit:
        logits[63, 17] = large_logit
    weights, operations_run = _ptx.run(code, logits / np.float32(scale))
    assert ("tanh.approx.f32" in operations_run) == has_large_logit
    np.testing.assert_allclose(
        np.log2(weights), 40 * np.tanh(logits), rtol=1e-6 if has_large_logit else 3e-4, atol=1e-5
    )
    if not has_large_logit:
        assert (abs(np.log2(weights) - 40 * np.tanh(logits)) > 1e-5).any()  # the polynomial was used


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-14, 1e-8, 1e8, 1e9, 1e18])
def test_weights_with_a_soft_cap_are_right_for_logits_of_any_size(scale: float) -> None:
    with _jax_triton.import_lock():
        from ejkernel_triton.flash_attention_sm90 import _shared
    code, _ = _shared._soft_cap_weights_ptx.fn(scale, 40.0, 64)
    logits = np.random.default_rng(0).uniform(-0.34, 0.34, (64, 32)).astype(np.float32)
    weights, _ = _ptx.run(code, logits / np.float32(scale))
    np.testing.assert_allclose(np.log2(weights), 40 * np.tanh(logits), rtol=3e-4, atol=1e-5)


def test_a_large_soft_cap_is_a_tanh_near_zero_and_far_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with _jax_triton.import_lock():
        from ejkernel_triton.flash_attention_sm90 import _shared
    monkeypatch.setattr(_shared, "gl", SimpleNamespace(where=np.where, exp2=np.exp2))
    monkeypatch.setattr(_shared, "LOG2E", _shared.LOG2E.value)
    logits = np.linspace(-5, 5, 2001, dtype=np.float32)
    capped = _shared.apply_soft_cap.fn(SimpleNamespace(CAP=200.0, SCALE=0.5), logits * np.float32(400))
    np.testing.assert_allclose(capped, np.tanh(logits), rtol=2e-6)


# -- the gradient of queries ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("q_block", "dim"), [(64, 128), (128, 64), (64, 64), (64, 104), (64, 256), (64, 192)])
def test_the_gradient_of_queries_is_reordered_from_the_layout_of_threads(q_block: int, dim: int) -> None:
    batch, length, heads, wide = 2, 300, 3, width(dim)
    blocks = -(-length // q_block)
    expected = np.random.default_rng(0).normal(size=(batch, blocks * q_block, heads, wide)).astype("float32")
    rows_of_threads = np.zeros((batch, heads, blocks, q_block // 64, wide // 64, 128, 32), "float32")
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for number in range(32):
            # As a warp group has the result of a product.
            row = 16 * warp + 8 * (number // 2 % 2) + lane // 4
            column = 8 * (number // 4) + 2 * (lane % 4) + number % 2
            tiles = expected[:, row::64, :, column::64].reshape(batch, blocks, q_block // 64, heads, -1)
            rows_of_threads[..., thread, number] = tiles.transpose(0, 3, 1, 2, 4)
    d_query = flash_attention_bwd.in_order(
        jnp.asarray(rows_of_threads.reshape(-1, 32)), (batch, length, heads, dim), q_block
    )
    np.testing.assert_array_equal(d_query, expected[:, :length, :, :dim])


# -- refusals -----------------------------------------------------------------------------------------------


def invocation(dim: int = 128, value_dim: int | None = None, dtype: str = "bfloat16", **values: Any) -> Invocation:
    capability = values.pop("capability", (9, 0))
    query, value = (jax.ShapeDtypeStruct((2, 512, 4, d), dtype) for d in (dim, value_dim or dim))
    inv = ejkernel_core.invocation(FORWARD, query, query, value, **values)
    return attrs.evolve(inv, platform="gpu", device_kind=H200, compute_capability=capability)


def test_the_portable_kernels_come_first_where_these_were_not_measured() -> None:
    few = jax.ShapeDtypeStruct((2, 16, 4, 128), "bfloat16")
    cache = {"kv_lengths": jax.ShapeDtypeStruct((2,), "int32")}
    assert flash_attention.rank(invocation()) == 60
    assert flash_attention.rank(attrs.evolve(invocation(), arguments={**invocation().arguments, "query": few})) == 45
    assert flash_attention.rank(invocation(**cache)) == 45
    assert [flash_attention_bwd.rank(inv) for inv in (invocation(), invocation(**cache))] == [60, 45]


REFUSALS = {
    "compute capability 9.0 .Hopper.; this GPU has 10.0": {"capability": (10, 0)},
    "float16 and bfloat16; not float32": {"dtype": "float32"},
    "not 128 for queries and 64 for values": {"value_dim": 64},
    "multiples of 8 for head dims; not 100": {"dim": 100},
    "take no bias": {"bias": jax.ShapeDtypeStruct((1, 1, 512, 512), "bfloat16")},
    "take no attention_mask": {"attention_mask": jax.ShapeDtypeStruct((1, 1, 512, 512), "bool")},
    "do no dropout": {"dropout_prob": 0.1, "dropout_seed": 3},
    "positive softmax_scale; not 0.0": {"softmax_scale": 0.0},
    "positive softmax_scale; not -0.5": {"softmax_scale": -0.5},
    "take no logits_soft_cap of 1e-10": {"logits_soft_cap": 1e-10},
}


@pytest.fixture
def supported_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jax_triton, "version", lambda: (0, 4, 1))
    monkeypatch.setattr(_jax_triton, "no_descriptors_reason", lambda: None)


@pytest.mark.usefixtures("supported_versions")
@pytest.mark.parametrize("reason", REFUSALS)
def test_unsupported_calls_are_refused_with_the_reason(reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        flash_attention.heuristic_cfg(invocation(**REFUSALS[reason]))


@pytest.mark.usefixtures("supported_versions")
def test_a_configuration_that_does_not_fit_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"stages=3. does not fit; these do"):
        flash_attention.check_cfg(invocation(), flash_attention.Config(128, 3))


def test_an_old_jax_triton_is_refused_with_the_command_that_updates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_jax_triton, "version", lambda: (0, 3, 1))
    with pytest.raises(Unsupported, match=r"pip install .jax-triton>=0.4.1"):
        flash_attention.heuristic_cfg(invocation())


# -- launches ----------------------------------------------------------------------------------------


@pytest.mark.skipif(
    _jax_triton.version() < (0, 4, 1) or _jax_triton.no_descriptors_reason() is not None, reason="jax-triton is too old"
)
def test_jax_triton_compiles_both_passes_and_no_launch_allocates_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # XLA makes graphs of several launches, and there is no place for it there.
    kernels: list[Any] = []
    original = _protocol.TritonKernel
    monkeypatch.setattr(_protocol, "TritonKernel", lambda *values: kernels.append(original(*values)) or kernels[-1])
    registry = Registry(plugins="ejkernel-ops")
    registry.register(flash_attention, f"{FORWARD}.gluon_sm90")
    registry.register(flash_attention_bwd, f"{BACKWARD}.gluon_sm90")
    shape = jax.ShapeDtypeStruct((2, 300, 4, 72), "bfloat16")

    def step(*arrays: jax.Array) -> Any:
        out, pull_back = jax.vjp(lambda *qkv: registry.call(FORWARD, *qkv, causal=True), *arrays)
        return pull_back(out)

    kernels_of_step = compiled_for(H200, step, shape, shape, shape)
    assert [kernel.num_warps for kernel in kernels_of_step] == [12, 12]
    assert [(kernel.kernel_name, kernel.global_scratch_size) for kernel in kernels] == [
        ("attend", None),
        ("sum_over_queries", None),
    ]
