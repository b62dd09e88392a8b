"""Attention over pages, through the interpreter: compared with NumPy in float64.

``EJKERNEL_RANDOM_CALLS=200 pytest plugins/triton/tests/test_paged_attention.py -k more`` runs two hundred calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import Unsupported
from ejkernel_ops.ragged_paged_attention.examples import MIXED, Sizes, drawn, large
from ejkernel_ops.ragged_paged_attention.random_calls import as_dtype, check, expected
from ejkernel_triton import ragged_paged_attention
from ejkernel_triton.interpreter import interpreted, interpreted_registry
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability_by_name
from ejkernel_triton.ragged_paged_attention import Config, _tiling
from plugins.triton.tests.paged_calls import alone

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

OP = "ragged_paged_attention"
REGISTRY = interpreted_registry({f"{OP}.triton": ragged_paged_attention})
COUNT = int(os.environ.get("EJKERNEL_RANDOM_CALLS", "40"))
DTYPES = ("float32", "bfloat16", "float16")
#: One split; fewer than there are blocks; more. The first is the heuristic.
CONFIGS = (None, Config(1, 32, 4, 2), Config(2, 16, 4, 2), Config(8, 32, 4, 2), Config(32, 16, 2, 1))
DECODE = Sizes((1,) * 9, (300, 5, 129, 257, 1, 40, 700, 128, 64), 16)


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    with interpreted():
        yield


def compute(given: dict[str, Any], cfg: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The output and the lse."""
    out, lse = REGISTRY.call(OP, **given, return_lse=True, backend="triton", cfg=cfg)
    return np.asarray(out), np.asarray(lse)


def compare(given: dict[str, Any], cfg: Any = None, tolerance: float = 2e-6) -> None:
    """The results with those of NumPy, which sees only the slots that a token sees."""
    for actual, right in zip(compute(given, cfg), expected(given), strict=True):
        np.testing.assert_allclose(actual.astype(np.float64), right, rtol=tolerance, atol=tolerance)


def call(sizes: Sizes, **options: Any) -> dict[str, Any]:
    return as_dtype(drawn(sizes, 3), "float32") | options


def on_card(given: dict[str, Any], card: str = "NVIDIA H200") -> Any:
    """The invocation that the kernel gets on a card."""
    inv = REGISTRY.invocation(OP, **given)
    return attrs.evolve(inv, platform="gpu", device_kind=card, compute_capability=capability_by_name(card))


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed: int) -> None:
    """All options, layouts and sizes of pages; NaN in all rows behind lengths; the same bits twice."""
    options = {"registry": REGISTRY, "backend": "triton", "cfg": CONFIGS[seed % len(CONFIGS)]}
    check(seed, **options, dtype=DTYPES[seed % len(DTYPES)], most_keys=300)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60, 60 + COUNT))
def test_more_random_calls(seed: int) -> None:
    options = {"registry": REGISTRY, "backend": "triton", "cfg": CONFIGS[seed % len(CONFIGS)]}
    check(seed, **options, dtype=DTYPES[seed // 2 % len(DTYPES)], most_keys=300)


@pytest.mark.parametrize("page_size", [1, 3, 16, 24, 32, 48, 64, 100, 1024])
@pytest.mark.parametrize("cfg", CONFIGS[1:4], ids=str)
def test_pages_of_any_size(page_size: int, cfg: Config) -> None:
    """One entry of the table for a block, where blocks divide pages, and one for each key."""
    compare(call(Sizes((3, 1, 9), (130, 64, 33), page_size)), cfg)


@pytest.mark.parametrize("most", [None, 1, 2, 4, 8, 64], ids="at most {}".format)
@pytest.mark.parametrize("group", [1, 3, 4, 16, 20], ids="group {}".format)
def test_tiles_of_any_size(group: int, most: int | None) -> None:
    """Of so many tokens that ``max_query_len`` says, or fewer; the last tile of a sequence is not full."""
    queries = (min(most or 40, 40), 1, 0, min(most or 13, 13))
    given = call(Sizes(queries, (61, 7, 4, 50), 8, 2 * group, 2, 24, 40, padding=5), max_query_len=most)
    compare({name: x for name, x in given.items() if x is not None}, Config(2, 16, 4, 2))


@pytest.mark.parametrize("heads", [70, 96])
def test_more_heads_of_a_key_head_than_a_tile_has(heads: int) -> None:
    given = call(Sizes((1, 2), (40, 21), 8, heads, 1, 16), softmax_aux=jnp.ones((heads, 1)), max_query_len=2)
    for cfg in (Config(1, 16, 4, 2), Config(4, 16, 4, 2)):
        compare(given, cfg)


@pytest.mark.parametrize("padding", [0, 1, 7, 150])
@pytest.mark.parametrize("count", [None, 0, 1, 3])
@pytest.mark.parametrize("cfg", CONFIGS[1:3], ids=str)
def test_tokens_of_no_sequence_are_zero(padding: int, count: int | None, cfg: Config) -> None:
    """Behind the last sequence, and those of sequences that do not count, whatever the sinks."""
    given = call(Sizes((17, 1, 3), (17, 20, 9), padding=padding), softmax_aux=jnp.ones((4, 2)))
    compare(given if count is None else given | {"num_seqs": np.int32(count)}, cfg)


@pytest.mark.parametrize("cfg", CONFIGS[1:], ids=str)
def test_keys_that_no_token_sees_are_not_fetched(cfg: Config) -> None:
    """They are NaN here, and a weight of 0 would not hide them."""
    given = call(Sizes((2, 3), (90, 60), 8), sliding_window=(10, 0))
    pages, tables = np.array(given["kv_pages"]), given["block_tables"]
    for sequence, first in ((0, 78), (1, 47)):
        for slot in range(first):
            pages[tables[sequence, slot // 8], slot % 8] = np.nan
    compare(given | {"kv_pages": jnp.asarray(pages)}, cfg)


def test_entries_before_a_window_are_not_read() -> None:
    """Pages of a window that has moved on may be those of another sequence, or none."""
    given = call(Sizes((1, 2), (90, 60), 8), sliding_window=(10, 0))
    right = expected(given)[0]
    tables = given["block_tables"].copy()
    tables[0, :9], tables[1, :5] = -1, 2**31 - 1
    for cfg in CONFIGS:
        np.testing.assert_allclose(compute(given | {"block_tables": tables}, cfg)[0], right, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_nothing_behind_a_table_is_read(page_size: int) -> None:
    """The interpreter refuses what is behind the last entry of the last sequence."""
    given = call(Sizes((2, 1), (3, 70), page_size))
    given["block_tables"] = given["block_tables"][:, : -(-70 // page_size)]
    for cfg in CONFIGS:
        compare(given, cfg)


@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 1.5}, {"softmax_scale": -0.2}], ids=str)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_scales_of_heads(dtype: str, options: dict[str, Any]) -> None:
    """In float32; the scale of keys comes before a soft cap, that of values is a factor of the output."""
    given = call(Sizes((3, 1), (70, 33), 16), **options)
    pages = np.random.default_rng(4).integers(-100, 100, given["kv_pages"].shape)
    given["kv_pages"] = jnp.asarray(pages, jnp.float32).astype(dtype)
    given |= {"k_scale": np.array([0.005, 0.02], np.float32), "v_scale": np.array([0.5, 0.02], np.float32)}
    for cfg in CONFIGS[1:3]:
        compare(given, cfg, tolerance=2e-5)


def test_a_key_of_nan_that_is_seen_reaches_the_result() -> None:
    given = call(Sizes((1, 1), (70, 30), 16))
    pages = given["kv_pages"].at[given["block_tables"][0, 4], 5, 2].set(jnp.nan)  # slot 69, key head 1
    for cfg in CONFIGS:
        out, _ = compute(given | {"kv_pages": pages}, cfg)
        assert np.isnan(out[0, 2:]).all()
        assert np.isfinite(out[0, :2]).all()
        assert np.isfinite(out[1]).all()


def test_logits_of_any_size() -> None:
    for size in (1e-20, 1e4, 1e18):
        given = call(Sizes((2, 5), (70, 33), 16))
        compare(given | {"query": given["query"] * size}, Config(4, 16, 4, 2), tolerance=1e-5)


def test_scales_below_zero_and_of_zero() -> None:
    for scale in (-0.2, 0.0):
        for cfg in CONFIGS[1:3]:
            compare(call(MIXED, softmax_scale=scale), cfg)


# -- parts of a fixed size -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": (150, 0)}, {"softmax_aux": np.ones((4, 2))}],
    ids=["plain", "window", "sinks"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("queries", [1, 5], ids="queries {}".format)
def test_a_sequence_has_the_same_bits_alone_and_among_others(queries: int, dtype: str, options: dict[str, Any]) -> None:
    lengths = (300, 5, 129, 257, 6, 40, 700, 128, 64)
    sizes = Sizes(tuple(queries if place % 2 == 0 else 1 for place in range(9)), lengths, 16)
    given = as_dtype(drawn(sizes, 3) | options, dtype) | {"split_size": 128}
    out, lse = compute(given)
    right, _ = expected(given)
    np.testing.assert_allclose(out.astype(np.float64), right, atol={"float32": 2e-6, "bfloat16": 2e-2}[dtype])
    heuristic = ragged_paged_attention.heuristic_cfg(on_card(given))
    for place, splits in ((0, 1), (0, 2), (3, 4), (4, 1), (6, None), (6, 1)):
        cfg = None if splits is None else attrs.evolve(heuristic, splits=splits)
        own_out, own_lse = compute(alone(given, place) | {"max_query_len": queries}, cfg)
        own = slice(*given["query_start_loc"][place : place + 2])
        assert own_out.tobytes() == out[own].tobytes()
        assert own_lse.tobytes() == np.ascontiguousarray(lse[:, own]).tobytes()


def test_the_size_of_parts_alone_decides_the_bits() -> None:
    """Tiles, blocks and warps are the same for all calls."""
    decided = set()
    for sequences, keys, queries in ((1, 32, 1), (64, 8192, 1), (2, 128, 300), (300, 4096, 4)):
        given = jax.eval_shape(partial(large, sequences, keys, queries, 0, page_size=16))
        inv = on_card(given | {"split_size": 256, "max_query_len": queries})
        space = _tiling.shapes(inv)
        assert len({shape[1:3] for shape in space}) == 1
        decided.add((_tiling.tile(inv), space[0][1:3]))
    assert len(decided) == 1


def test_one_program_has_all_parts_where_their_sums_would_be_too_large() -> None:
    given = jax.eval_shape(partial(large, 4, 65536, 2048, 0)) | {"split_size": 128, "max_query_len": 2048}
    inv = on_card(given)
    assert {shape[0] for shape in _tiling.shapes(inv)} == {1}
    with pytest.raises(Unsupported, match=r"2 splits need \d+ bytes; there may be 268435456"):
        ragged_paged_attention.check_cfg(inv, Config(2, 64, 4, 3))


# -- configurations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"sliding_window": (30, 0)}, {"split_size": 128}], ids=str)
def test_every_configuration_has_the_same_results(options: dict[str, Any]) -> None:
    given = call(Sizes((3, 1), (700, 600), 64), **options)
    space = list(ragged_paged_attention.config_space(on_card(given)))
    assert len({*space}) == len(space) > 3
    for cfg in space:
        compare(given, cfg)


@pytest.mark.parametrize(
    ("given", "tile", "splits"),
    [
        ((64, 8192, 1), (1, 4, 16), 2),
        ((1, 16384, 1), (1, 4, 16), 128),
        ((256, 2048, 1), (1, 4, 16), 1),
        ((64, 8192, 4), (4, 4, 16), 1),
        ((2, 2048, 512), (16, 4, 64), 1),
    ],
)
def test_tiles_and_splits_by_shape(given: tuple[int, int, int], tile: tuple[int, int, int], splits: int) -> None:
    """Four programs for each multiprocessor, if each of them has two blocks of keys that a tile sees."""
    inv = on_card(jax.eval_shape(partial(large, *given, 0)) | {"max_query_len": given[2]})
    assert _tiling.tile(inv) == tile
    assert ragged_paged_attention.heuristic_cfg(inv).splits == splits


def test_a_configuration_that_does_not_fit_is_refused() -> None:
    inv = on_card(jax.eval_shape(partial(large, 1, 1024, 1, 0)) | {"max_query_len": 1})
    with pytest.raises(Unsupported, match=r"\(1, 128, 4, 6\) need \d+ bytes of shared memory, and there are 232448"):
        ragged_paged_attention.check_cfg(inv, Config(1, 128, 4, 6))


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"query": np.ones((1, 2, 264), np.float32), "kv_pages": np.ones((3, 4, 2, 264), np.float32)}, "up to 256"),
        ({"query": np.ones((0, 2, 16), np.float32)}, "takes no call without tokens"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_other_calls_are_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    given = {
        "query": np.ones((1, 2, 16), np.float32),
        "kv_pages": np.ones((3, 4, 2, 16), np.float32),
        "kv_lens": np.array([3], np.int32),
        "block_tables": np.array([[1, 2]], np.int32),
        "query_start_loc": np.array([0, 1], np.int32),
    }
    with pytest.raises(Unsupported, match=reason):
        ragged_paged_attention.heuristic_cfg(on_card(given | changes))


def test_float8_needs_a_card_that_has_it() -> None:
    pages = jnp.ones((3, 4, 2, 64), jnp.float8_e4m3fn)
    given = call(Sizes((1,), (9,), 4, 2, 1)) | {"kv_pages": pages, "k_scale": 1.0, "v_scale": 1.0}
    with pytest.raises(Unsupported, match="from compute capability 8.9"):
        ragged_paged_attention.heuristic_cfg(on_card(given, "NVIDIA A100-SXM4-80GB"))
    assert ragged_paged_attention.heuristic_cfg(on_card(given, "NVIDIA L40S")).splits == 1
