"""The decode kernel for Hopper, through the interpreter, which draws the order of copies, warps and products: compared
with NumPy in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import Unsupported
from ejkernel_ops.flash_attention.random_calls import check, random_call
from ejkernel_triton import flash_attention_decode, flash_attention_sm90
from ejkernel_triton import flash_attention_decode_sm90 as decode
from ejkernel_triton.flash_attention_decode_sm90 import Config, _launch, _tiling
from ejkernel_triton.gluon import requirements
from ejkernel_triton.interpreter import interpreted, interpreted_registry
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.split_keys import shapes
from plugins.triton.tests.decode_calls import Kernel, cache, call, normal

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

REGISTRY = interpreted_registry({"flash_attention.gluon_decode_sm90": decode})
#: Weights are rounded before they are multiplied, and outputs once more.
KERNEL = Kernel(REGISTRY, "gluon_decode_sm90", "float16", 2e-3)
compare, on_card = KERNEL.compare, KERNEL.on_card
REFUSED = frozenset({"attention_mask", "bias", "q_segment_ids", "kv_segment_ids", "kv_positions"})
#: One split; fewer than there are blocks; more.
CONFIGS = (Config(1, 64, 2, 4, 2), Config(2, 64, 3, 8), Config(4, 128, 2, 4), Config(16, 64, 1, 4))


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    """Three programs compute all parts of a call. The interpreter needs no version of jax-triton that takes Gluon."""
    with pytest.MonkeyPatch.context() as patch, interpreted():
        patch.setattr(requirements, "_unavailable_reason", lambda: None)
        for module in (_launch, _tiling):
            patch.setattr(module, "multiprocessors", lambda inv: 3)
        yield


def has_few_queries(seed: int) -> bool:
    return bool(random_call(seed)["query"].shape[1] <= 16)


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [seed for seed in range(1, 300, 5) if has_few_queries(seed)][:30])
def test_random_calls(seed: int) -> None:
    """Starts and lengths; windows, caps and sinks; NaN in all slots without a key; the same bits twice."""
    cfg = CONFIGS[seed // 5 % len(CONFIGS)]
    query, key = (random_call(seed)[name].shape for name in ("query", "key"))
    if query[1] * query[2] // key[2] > 32:  # a tile of 64 rows
        cfg = attrs.evolve(cfg, num_warps=4)
    options = {"registry": REGISTRY, "backend": "gluon_decode_sm90", "cfg": cfg}
    dtype = ("bfloat16", "float16")[seed % 2]
    check(seed, **options, without=REFUSED, gradients=False, dtype=dtype)


@pytest.mark.parametrize(("queries", "group"), [(1, 1), (2, 3), (4, 4), (7, 5), (16, 1), (16, 6)])
def test_all_heads_of_a_key_head_are_in_one_tile_or_several(queries: int, group: int) -> None:
    given = call(1, queries, 90, group, causal=True, softmax_aux=normal(3, 2 * group, 2))
    for cfg in (CONFIGS[0], CONFIGS[2]):
        compare(given, cfg)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "sliding_window": (70, 0)},
        {"sliding_window": (66, 5)},
        {"logits_soft_cap": 2.0},
        {"causal": True, "softmax_aux": normal(3, 4, 3)},
    ],
    ids=["plain", "causal window", "window", "cap", "sinks"],
)
def test_lengths(options: dict[str, Any]) -> None:
    """None, one, a few, and all; the slots behind them are NaN."""
    lengths = np.array([0, 1, 137, 200], np.int32)
    given = call(4, 3, 200, kv_lengths=lengths, **options)
    is_empty = np.arange(200)[None] >= lengths[:, None]
    given["key"][is_empty], given["value"][is_empty] = np.nan, np.nan
    for cfg in CONFIGS:
        compare(given, cfg)


def test_keys_that_no_query_sees_are_never_used() -> None:
    """They are NaN here, and a weight of 0 would not hide them. Blocks begin at the first key that is seen."""
    slots = np.tile(np.arange(200), (2, 1))
    given = call(2, 2, 200, q_start=np.array([90, 155], np.int32), causal=True, sliding_window=(80, 0))
    is_hidden = (slots < np.array([[10], [75]])) | (slots > np.array([[91], [156]]))
    given["key"][is_hidden], given["value"][is_hidden] = np.nan, np.nan
    for cfg in CONFIGS:
        compare(given, cfg)


def test_a_key_of_nan_that_is_seen_reaches_the_result() -> None:
    for cfg in CONFIGS:
        given = call(1)
        given["key"][0, 69, 1] = np.nan
        out, _ = KERNEL.compute(KERNEL.rounded(given), cfg)
        assert np.isnan(out[..., 2:, :]).all()
        assert np.isfinite(out[..., :2, :]).all()


@pytest.mark.parametrize("slots", [1, 64, 65])
def test_a_cache_of_few_slots(slots: int) -> None:
    """For jax-triton an argument of 1 is a constant."""
    for cfg in CONFIGS:
        compare(call(2, 2, slots, causal=True), cfg)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-31])
def test_a_scale_of_any_sign(scale: float) -> None:
    given = call(1, 2, 100, causal=True)
    given["query"] *= scale * 24**0.5
    out, lse = KERNEL.compute(KERNEL.rounded(call(1, 2, 100, causal=True)) | {"softmax_scale": scale}, CONFIGS[1])
    given = {name: x.astype(np.float16).astype(np.float32) if name != "query" else x for name, x in given.items()
             if name in ("query", "key", "value")} | {"causal": True}  # fmt: skip
    right, right_lse = ejkernel_core.call("flash_attention", **given, return_lse=True, backend="reference")
    np.testing.assert_allclose(out.astype(np.float32), right, rtol=3e-3, atol=3e-3)
    np.testing.assert_allclose(lse, right_lse, rtol=1e-3, atol=1e-3)


# -- configurations --------------------------------------------------------------------------------------------------


def test_every_configuration_has_the_same_results() -> None:
    given = call(1, 3, 600, causal=True, sliding_window=(500, 0))
    space = list(decode.config_space(on_card(KERNEL.rounded(given))))
    assert len({*space}) == len(space) > 4
    for cfg in space:
        compare(given, cfg)


@pytest.mark.parametrize(
    ("queries", "options"), [(4, {}), (16, {"sliding_window": (30, 0)}), (9, {"logits_soft_cap": 2.0})]
)
@pytest.mark.parametrize("cfg", [CONFIGS[0], CONFIGS[2], CONFIGS[3]])
def test_tiles_of_64_rows(queries: int, options: dict[str, Any], cfg: Config) -> None:
    """Which are not transposed: lengths within blocks, sinks, and one tile or several; NaN behind the lengths."""
    lengths = np.array([1, 77, 200], np.int32)
    given = call(3, queries, 200, 12, kv_lengths=lengths, softmax_aux=normal(3, 24, 2), causal=True, **options)
    is_empty = np.arange(200)[None] >= lengths[:, None]
    given["key"][is_empty], given["value"][is_empty] = np.nan, np.nan
    compare(given, cfg)


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        (cache(64, 8192, 32, 8), (1, 64, 3, 4, 2)),
        (cache(16, 32768, 32, 8), (1, 64, 3, 4, 2)),
        (cache(10, 16384, 32, 8), (1, 64, 3, 4, 2)),
        (cache(1, 131072, 32, 8), (16, 64, 3, 4, 2)),
        (cache(1, 1024, 32, 8), (8, 64, 3, 4, 2)),
        (cache(64, 4096, 64, 8, dim=64), (1, 128, 3, 4, 2)),
        (cache(1, 32768, 32, 8) | {"sliding_window": (1023, 0), "causal": True}, (8, 64, 3, 4, 2)),
        # Tiles of 64 rows.
        (cache(64, 8192, 32, 8, queries=16), (1, 64, 3, 4, 2)),
        (cache(16, 32768, 32, 8, queries=16), (2, 64, 3, 4, 2)),
        # Two tiles for a block of keys.
        (cache(256, 2048, 64, 8, queries=16), (1, 128, 3, 4, 1)),
        (cache(4, 4096, 8, 2, queries=16, dim=256), (16, 64, 2, 4, 1)),
    ],
)
def test_the_rings_are_most_of_the_shared_memory(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], shape: tuple[int, ...]
) -> None:
    """And most multiprocessors have a part, if each of these has two blocks of keys that a query sees."""
    inv = on_card(given)
    monkeypatch.setattr(_tiling, "multiprocessors", lambda inv: 132)
    assert attrs.astuple(decode.heuristic_cfg(inv)) == shape
    _, block, stages, _, programs = shape
    rings = programs * stages * block * 2 * 2 * inv["query"].shape[3]
    assert 128 << 10 <= rings <= 192 << 10
    assert rings < programs * decode.shared_memory(inv, Config(*shape))["attend"] <= 228 - programs << 10


@pytest.mark.parametrize(
    ("queries", "cfg", "reason"),
    [
        (1, Config(1, 128, 8, 4), r"\(1, 128, 8, 4, 1\) need \d+ bytes of shared memory, and there are 232448"),
        (1, Config(1, 64, 6, 4, 2), r"\(1, 64, 6, 4, 2\) need \d+ bytes of shared memory, and there are 115712"),
        (16, Config(1, 128, 1, 4, 2), "logits and sums of 64 rows are too many for the registers of 4 warps"),
        (16, Config(1, 64, 2, 8), "only one tile, of less than 64 rows, in one program may have eight warps"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(queries: int, cfg: Config, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        decode.check_cfg(on_card(cache(1, 1024, 32, 8, queries)), cfg)


def test_the_largest_heads_fit() -> None:
    inv = on_card(cache(1, 4096, 64, 4, 16, 256))
    limit = {1: 232448, 2: 115712}
    for cfg in decode.config_space(inv):
        assert cfg.stages > 1
        assert shapes.shared_memory(_tiling.problem(inv), attrs.astuple(cfg)) <= limit[cfg.programs]


# -- refusals --------------------------------------------------------------------------------------------------------

SHORT = KERNEL.rounded(call())


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (call(), r"the Gluon decode kernel takes float16 and bfloat16; not float32"),
        (KERNEL.rounded(call(queries=17)), "takes up to 16 queries; not 17"),
        (SHORT | {"attention_mask": np.ones((1, 1, 1, 70), bool)}, "takes no attention_mask"),
        (
            SHORT | {"kv_positions": np.zeros((2, 70), np.int32), "q_start": np.zeros(2, np.int32)},
            "the Gluon decode kernel takes no kv_positions",
        ),
        (SHORT | {"value": jnp.ones((2, 70, 2, 12), "float16")}, "multiples of 8 for head dims; not 12"),
    ],
    ids=["float32", "queries", "mask", "positions", "head dim"],
)
def test_other_calls_are_refused_with_the_reason(given: dict[str, Any], reason: str) -> None:
    for hook in (decode.heuristic_cfg, decode.config_space):
        with pytest.raises(Unsupported, match=reason):
            hook(on_card(given))


def test_other_cards_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"compute capability 9.0 \(Hopper\); this GPU has 8.0"):
        decode.heuristic_cfg(on_card(SHORT, "NVIDIA A100-SXM4-80GB"))


CUDNN = 70  # the rank of ejkernel_cudnn for one query


@pytest.mark.parametrize(
    ("queries", "slots", "is_first"), [(1, 10, True), (2, 511, False), (2, 512, True), (16, 5000, True)]
)
def test_it_comes_first_but_for_several_queries_and_few_keys(queries: int, slots: int, is_first: bool) -> None:
    inv = on_card(cache(1, slots, 4, 4, queries))
    portable = flash_attention_decode.PLATFORMS["gpu"]
    assert (decode.rank(inv) > max(portable, CUDNN)) is is_first
    assert min(decode.rank(inv), portable) > flash_attention_sm90.rank(inv)
