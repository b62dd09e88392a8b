"""The decode kernel against a cache, through the interpreter: compared with NumPy in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import ejkernel_core
from ejkernel_core import Unsupported
from ejkernel_ops.flash_attention.random_calls import check, random_call
from ejkernel_triton import flash_attention_decode
from ejkernel_triton.flash_attention_decode import Config, _tiling
from ejkernel_triton.interpreter import interpreted, interpreted_registry
from ejkernel_triton.launch import _jax_triton
from ejkernel_tuning import find_labels_in_lowered
from plugins.triton.tests.decode_calls import Kernel, cache, call, normal

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

REGISTRY = interpreted_registry({"flash_attention.triton_decode": flash_attention_decode})
KERNEL = Kernel(REGISTRY, "triton_decode")
compare, on_card = KERNEL.compare, KERNEL.on_card
REFUSED = frozenset({"attention_mask", "bias", "q_segment_ids", "kv_segment_ids"})
#: One split; fewer than there are blocks; more.
CONFIGS = (Config(1, 32, 4, 2), Config(2, 16, 4, 2), Config(8, 32, 4, 2), Config(32, 16, 2, 1))


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    with interpreted():
        yield


def has_few_queries(seed: int) -> bool:
    return bool(random_call(seed)["query"].shape[1] <= 16)


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [seed for seed in range(0, 300, 3) if has_few_queries(seed)][:60])
def test_random_calls(seed: int) -> None:
    """Starts, lengths and rings; windows, caps and sinks; NaN in all slots without a key; the same bits twice."""
    options = {"registry": REGISTRY, "backend": "triton_decode", "cfg": CONFIGS[seed // 3 % len(CONFIGS)]}
    dtype = ("float32", "float32", "bfloat16", "float16")[seed % 4]
    check(seed, **options, without=REFUSED, gradients=seed % 5 == 0, backward="reference", dtype=dtype)


@pytest.mark.parametrize("group", [1, 3, 4, 16], ids="group {}".format)
@pytest.mark.parametrize("queries", [1, 2, 4, 8, 16], ids="queries {}".format)
def test_all_heads_of_a_key_head_are_in_one_tile_or_several(queries: int, group: int) -> None:
    given = call(1, queries, 45, group, causal=True, softmax_aux=normal(3, 2 * group, 2))
    compare(given, Config(2, 16, 4, 2))


@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "sliding_window": (20, 0)},
        {"sliding_window": (9, 5)},
        {"logits_soft_cap": 2.0},
        {"causal": True, "softmax_aux": normal(3, 4, 3)},
    ],
    ids=["plain", "causal window", "window", "cap", "sinks"],
)
def test_lengths(options: dict[str, Any], cfg: Config) -> None:
    """None, one, a few, and all; the slots behind them are NaN."""
    lengths = np.array([0, 1, 37, 70], np.int32)
    given = call(4, 3, kv_lengths=lengths, **options)
    is_empty = np.arange(70)[None] >= lengths[:, None]
    given["key"][is_empty], given["value"][is_empty] = np.nan, np.nan
    compare(given, cfg)


@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
def test_a_ring_that_has_wrapped_around(cfg: Config) -> None:
    end = np.array([[133], [40]])  # the second one is not full
    last = end - 1
    positions = last - (last - np.arange(70)) % 70
    positions = np.where(positions < 0, -1, positions).astype(np.int32)
    starts = (end[:, 0] - 4).astype(np.int32)
    given = call(2, 4, kv_positions=positions, q_start=starts, causal=True, sliding_window=(50, 0))
    given["key"][positions < 0], given["value"][positions < 0] = np.nan, np.nan
    compare(given, cfg)


@pytest.mark.parametrize("is_ring", [False, True], ids=["cache", "ring"])
@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
def test_keys_that_no_query_sees_are_not_fetched(cfg: Config, is_ring: bool) -> None:
    """They are NaN here, and a weight of 0 would not hide them."""
    slots = np.tile(np.arange(70), (2, 1))
    places = {"kv_positions": slots.astype(np.int32)} if is_ring else {}
    given = call(2, 2, **places, q_start=np.array([30, 55], np.int32), causal=True, sliding_window=(10, 0))
    is_hidden = (slots < np.array([[20], [45]])) | (slots > np.array([[31], [56]]))
    given["key"][is_hidden], given["value"][is_hidden] = np.nan, np.nan
    compare(given, cfg)


def test_a_key_of_nan_that_is_seen_reaches_the_result() -> None:
    for cfg in CONFIGS:
        given = call(1)
        given["key"][0, 69, 1] = np.nan
        out, _ = KERNEL.compute(given, cfg)
        assert np.isnan(out[..., 2:, :]).all()
        assert np.isfinite(out[..., :2, :]).all()


@pytest.mark.parametrize("slots", [1, 16, 17])
def test_a_cache_of_few_slots(slots: int) -> None:
    """For jax-triton an argument of 1 is a constant."""
    for cfg in CONFIGS:
        compare(call(2, 2, slots, causal=True), cfg)


def test_logits_of_any_size() -> None:
    for size in (1e-20, 1e4, 1e18):
        given = call(1, 2)
        given["query"] *= size
        compare(given, Config(4, 16, 4, 2), tolerance=1e-5)


# -- configurations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True, "sliding_window": (30, 0)}], ids=["plain", "window"])
def test_every_configuration_has_the_same_results(options: dict[str, Any]) -> None:
    given = call(1, 3, 600, **options)
    space = list(flash_attention_decode.config_space(on_card(given)))
    assert len({*space}) == len(space) > 4
    for cfg in space:
        compare(given, cfg)


@pytest.mark.parametrize(
    ("given", "splits"),
    [
        (cache(64, 8192, 32, 8), 2),
        (cache(16, 32768, 32, 8), 8),
        (cache(256, 2048, 64, 8), 1),
        (cache(1, 131072, 32, 8), 128),
        (cache(1, 1024, 32, 8), 8),
        (cache(1, 32768, 32, 8) | {"sliding_window": (1023, 0), "causal": True}, 8),
        (cache(4, 16, 4, 4), 1),
    ],
)
def test_the_card_has_enough_programs(given: dict[str, Any], splits: int) -> None:
    """Four for each multiprocessor, if each of them has two blocks of keys that a query sees."""
    assert flash_attention_decode.heuristic_cfg(on_card(given)).splits == splits


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        (cache(64, 8192, 32, 8), (2, 32, 4, 4)),
        (cache(64, 8192, 32, 8, queries=4), (2, 32, 4, 4)),
        (cache(64, 8192, 32, 8, queries=16), (2, 64, 4, 3)),
        (cache(256, 2048, 64, 8), (1, 64, 4, 3)),
    ],
)
def test_long_splits_of_low_tiles_have_short_steps(given: dict[str, Any], shape: tuple[int, ...]) -> None:
    assert attrs.astuple(flash_attention_decode.heuristic_cfg(on_card(given))) == shape


def test_a_configuration_that_does_not_fit_is_refused() -> None:
    inv = on_card(cache(1, 1024, 32, 8))
    with pytest.raises(Unsupported, match=r"\(1, 128, 4, 6\) need \d+ bytes of shared memory, and there are 232448"):
        flash_attention_decode.check_cfg(inv, Config(1, 128, 4, 6))


def test_the_largest_heads_fit_every_card() -> None:
    for dtype in ("bfloat16", "float32"):
        for card in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA GB200"):
            given = {name: x.update(dtype=dtype) for name, x in cache(1, 4096, 64, 4, 16, 256).items()}
            inv = on_card(given, card)
            assert all(_tiling.shared_memory(inv, shape) <= _tiling.limit(inv) for shape in _tiling.shapes(inv))


# -- refusals -----------------------------------------------------------------------------------------

MASK = np.ones((1, 1, 1, 70), bool)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (call(queries=17), "takes up to 16 queries; not 17"),
        (call(bias=MASK.astype(np.float32)), "takes no bias"),
        (call(attention_mask=MASK), "takes no attention_mask"),
        (
            call(q_segment_ids=np.ones((2, 1), np.int32), kv_segment_ids=np.ones((2, 70), np.int32)),
            "takes no q_segment_ids",
        ),
        (call(dropout_prob=0.1, dropout_seed=1), "does no dropout"),
        (call(slots=0), "takes no arrays without elements"),
        ({name: np.ones((1, 2, 1, 264), np.float32) for name in ("query", "key", "value")}, "head dims up to 256"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_other_calls_are_refused_with_the_reason(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        flash_attention_decode.heuristic_cfg(on_card(given))


def test_packed_sequences_are_refused() -> None:
    bounds = np.array([0, 1], np.int32)
    given = {name: x[0] for name, x in call(1).items() if name in ("query", "key", "value")}
    with pytest.raises(Unsupported, match="takes no cum_seqlens_q"):
        flash_attention_decode.heuristic_cfg(on_card(given | {"cum_seqlens_q": bounds, "cum_seqlens_k": bounds}))


# -- the choice ------------------------------------------------------------------------------------------------------


def chosen(given: dict[str, Any], card: str = "NVIDIA H200", **options: Any) -> str:
    """The kernel that computes a call on a card."""
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(card, None, "gpu"))
    attend = jax.jit(lambda arrays: ejkernel_core.call("flash_attention", **arrays, **options))
    with use_abstract_mesh(mesh):
        (label,) = find_labels_in_lowered(attend.trace(given).lower(lowering_platforms=("cuda",)))
    return str(label.backend)


@pytest.mark.parametrize("slots", [100, 8192])
def test_few_queries_come_here(slots: int) -> None:
    a100 = "NVIDIA A100-SXM4-80GB"
    lengths = {"kv_lengths": jax.ShapeDtypeStruct((16,), jnp.int32)}
    assert chosen(cache(16, slots, 32, 8, queries=4), a100, causal=True) == "triton_decode"
    assert chosen(cache(16, slots, 32, 8) | lengths, a100) == "triton_decode"
    assert chosen(cache(16, slots, 32, 8), a100, causal=True, sliding_window=(63, 0)) == "triton_decode"
    assert chosen(cache(16, slots, 32, 8, queries=17), a100, causal=True) == "triton"


def test_positions_of_a_ring_come_here_on_hopper() -> None:
    ring = {
        "kv_positions": jax.ShapeDtypeStruct((16, 1024), jnp.int32),
        "q_start": jax.ShapeDtypeStruct((16,), jnp.int32),
    }
    assert chosen(cache(16, 1024, 32, 8) | ring, causal=True) == "triton_decode"
