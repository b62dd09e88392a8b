"""The decode kernel against a cache, through Pallas' interpreter: compared with NumPy in float64.

``EJKERNEL_RANDOM_CALLS=100`` runs a hundred random calls.
"""

from __future__ import annotations

import os
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import ejkernel_core as core
from ejkernel_core import Unsupported
from ejkernel_ops.flash_attention.random_calls import check, expected, random_call
from ejkernel_pallas_tpu import flash_attention, flash_attention_decode
from ejkernel_pallas_tpu.flash_attention import backward as flash_attention_bwd
from ejkernel_pallas_tpu.flash_attention._problem import problem
from ejkernel_pallas_tpu.flash_attention._steps import FIRST, FULL, LAST, VISIBLE, is_set
from ejkernel_pallas_tpu.flash_attention_decode import Config, _tuning
from ejkernel_pallas_tpu.flash_attention_decode._visits import Visits, visits
from ejkernel_pallas_tpu.launch._generations import KINDS
from ejkernel_pallas_tpu.testing import interpreted_registry
from ejkernel_tuning import find_labels_in_lowered

COUNT = int(os.environ.get("EJKERNEL_RANDOM_CALLS", "6"))
BACKEND = "pallas_tpu_decode"
REGISTRY = interpreted_registry({f"flash_attention.{BACKEND}": flash_attention_decode})
REFUSED = frozenset({"attention_mask", "bias", "q_segment_ids", "kv_segment_ids"})
CONFIGS = (Config(128, 1), Config(128, 2), Config(256, 1))
DEVICES = ("TPU v5e", "TPU v4", "TPU v5p", "TPU v6e", "TPU7x")


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def call(
    batch: int = 2, queries: int = 1, slots: int = 300, kv_heads: int = 2, group: int = 2, **options: Any
) -> dict[str, Any]:
    """Values have another head dim than keys."""
    absent = dict.fromkeys(("causal", "sliding_window", "logits_soft_cap"))
    arrays = {
        "query": normal(0, batch, queries, kv_heads * group, 24),
        "key": normal(1, batch, slots, kv_heads, 24),
        "value": normal(2, batch, slots, kv_heads, 40),
    }
    return {**arrays, **absent, "causal": False, **options}


def compute(given: dict[str, Any], cfg: Config) -> tuple[Any, Any]:
    """The output and the lse."""
    results = REGISTRY.call("flash_attention", **given, return_lse=True, backend=BACKEND, cfg=cfg)
    return np.asarray(results[0], np.float32), np.asarray(results[1])


def compare(given: dict[str, Any], cfg: Config, tolerance: float = 3e-6) -> None:
    """The results with those of NumPy, which sees only the slots that hold a key."""
    out, lse = compute(given, cfg)
    right = expected(given, np.zeros(out.shape), None)
    np.testing.assert_allclose(out, right["out"], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, right["lse"], rtol=tolerance, atol=tolerance)


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [n for n in range(0, 1500, 7) if random_call(n)["query"].shape[1] <= 16][:COUNT])
def test_random_calls(seed: int) -> None:
    """Starts, lengths and rings; windows, caps and sinks; NaN in all slots without a key; the same bits twice."""
    options = {"registry": REGISTRY, "backend": BACKEND, "cfg": CONFIGS[seed % 2], "without": REFUSED}
    dtype = ("float32", "bfloat16")[seed // 2 % 2]
    check(seed, **options, gradients=seed % 3 == 0, backward="reference", dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kv_heads", "group", "queries"), [(1, 1, 1), (1, 5, 4), (2, 1, 16), (3, 3, 2), (8, 4, 3), (10, 2, 7), (9, 1, 2)]
)
def test_every_head_has_its_own_keys(kv_heads: int, group: int, queries: int, dtype: str) -> None:
    """One head; an even and an odd number, whose keys share words of 16 bits in other ways; more than are unrolled."""
    given = call(1, queries, 150, kv_heads, group, causal=True, softmax_aux=normal(3, kv_heads * group, 2))
    given |= {name: jnp.asarray(given[name], dtype) for name in ("query", "key", "value")}
    compare(given, Config(128, 1), 3e-6 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("dims", [(128, 256), (200, 64)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wide_heads(dims: tuple[int, int], dtype: str) -> None:
    dim, v_dim = dims
    given = call(1, 2, 140, causal=True)
    given |= {"query": normal(4, 1, 2, 4, dim), "key": normal(5, 1, 140, 2, dim), "value": normal(6, 1, 140, 2, v_dim)}
    given |= {name: jnp.asarray(given[name], dtype) for name in ("query", "key", "value")}
    compare(given, Config(128, 2), 3e-6 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "sliding_window": (150, 0)},
        {"sliding_window": (130, 5)},
        {"logits_soft_cap": 2.0},
        {"causal": True, "softmax_aux": normal(3, 4, 3)},
    ],
    ids=["plain", "causal window", "window", "cap", "sinks"],
)
def test_lengths(options: dict[str, Any], cfg: Config) -> None:
    """None, one, a few, and all; the slots behind them are NaN."""
    lengths = np.array([0, 1, 137, 300, 0], np.int32)
    given = call(5, 3, kv_lengths=lengths, **options)
    is_empty = np.arange(300)[None] >= lengths[:, None]
    given["key"][is_empty], given["value"][is_empty] = np.nan, np.nan
    compare(given, cfg)


@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
def test_a_ring_that_has_wrapped_around(cfg: Config) -> None:
    end = np.array([[533], [140]])  # the second one is not full
    last = end - 1
    positions = last - (last - np.arange(300)) % 300
    positions = np.where(positions < 0, -1, positions).astype(np.int32)
    starts = (end[:, 0] - 4).astype(np.int32)
    given = call(2, 4, kv_positions=positions, q_start=starts, causal=True, sliding_window=(150, 0))
    given["key"][positions < 0], given["value"][positions < 0] = np.nan, np.nan
    compare(given, cfg)


@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "sliding_window": (100, 0)}], ids=str)
def test_without_positions_the_visits_are_known(cfg: Config, options: dict[str, Any]) -> None:
    compare(call(2, 5, 600, **options), cfg)


@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
def test_a_key_of_nan_that_is_seen_reaches_the_results_of_its_head_alone(cfg: Config) -> None:
    for name in ("key", "value"):
        given = call(1)
        given[name][0, 299, 1] = np.nan
        out, _ = compute(given, cfg)
        assert np.isnan(out[..., 2:, :]).all()
        assert np.isfinite(out[..., :2, :]).all()


@pytest.mark.parametrize("slots", [1, 16, 128, 129])
def test_a_cache_of_few_slots(slots: int) -> None:
    compare(call(2, 2, slots, causal=True), Config(512, 2))


def test_logits_of_any_size() -> None:
    for size in (1e-20, 1e4):
        given = call(1, 2)
        given["query"] *= size
        compare(given, Config(128, 2), tolerance=2e-5)


def test_gradients_are_those_of_the_general_kernel() -> None:
    """It reads the output and the lse of this one."""
    kernels = {
        f"flash_attention.{BACKEND}": flash_attention_decode,
        "flash_attention_bwd.pallas_tpu": flash_attention_bwd,
    }
    options = {"registry": interpreted_registry(kernels), "backend": BACKEND, "cfg": Config(128, 2)}
    check(7, **options, without=REFUSED, backward="pallas_tpu")


# -- visits ----------------------------------------------------------------------------------------------------------


def plan(given: dict[str, Any], splits: int) -> tuple[Visits, list[list[tuple[int, int, int, int, int]]]]:
    """The visits of a call with blocks of 128, and of each split in order: batch entry, block, those that are fetched,
    and flags.
    """
    inv = core.invocation("flash_attention", **given)
    arrays = {name: jnp.asarray(given[name]) for name in inv if name in given and isinstance(given[name], np.ndarray)}
    if "kv_lengths" in arrays and "q_start" not in arrays:
        arrays["q_start"] = arrays["kv_lengths"] - given["query"].shape[1]
    inv = inv.with_arrays(arrays)
    p = attrs.evolve(problem(inv, 128, 128), q_block=16)
    result = visits(inv, p, splits)
    table, fetched = (np.asarray(x).reshape(splits, -1)[:, : int(result.count)] for x in (result.table, result.fetched))
    rows = [
        [
            (*(int(f(x)) for x in (word, source) for f in (result.batch_of, result.block_of)), int(word) & 15)
            for word, source in zip(*row, strict=True)
        ]
        for row in zip(table, fetched, strict=True)
    ]
    return result, rows


def seen_blocks(row: list[Any]) -> list[tuple[int, int]]:
    return [(entry, block) for entry, block, *_, flags in row if flags & VISIBLE]


LENGTHS = np.array([0, 300, 1, 513, 0, 700], np.int32)


@pytest.mark.parametrize("splits", [1, 2])
def test_there_are_as_many_visits_as_blocks_with_keys(splits: int) -> None:
    _, rows = plan(call(6, 1, 700, kv_lengths=LENGTHS), splits)
    blocks = [(b, j) for b, length in enumerate(LENGTHS) for j in range(-(-int(length) // 128))]
    assert sorted(block for row in rows for block in seen_blocks(row)) == blocks
    # 15 blocks, and one visit for each entry that has none in a split.
    assert [len(row) for row in rows] == ([17] if splits == 1 else [11, 11])
    for row in rows:
        assert [entry for entry, *_ in row] == sorted(entry for entry, *_ in row)
        for entry in range(6):
            flags = [flags for b, *_, flags in row if b == entry and flags]
            assert flags[0] & FIRST
            assert flags[-1] & LAST
            assert sum(bool(x & FIRST) + bool(x & LAST) for x in flags) == 2


@pytest.mark.parametrize("splits", [1, 2])
def test_a_visit_that_sees_nothing_fetches_nothing(splits: int) -> None:
    _, rows = plan(call(6, 1, 700, kv_lengths=LENGTHS), splits)
    for row in rows:
        fetched = [(b, j) for _, _, b, j, _ in row]
        changes = [block for n, block in enumerate(fetched) if n == 0 or block != fetched[n - 1]]
        assert changes == seen_blocks(row)


def test_a_full_block_has_no_mask() -> None:
    _, (row,) = plan(call(1, 1, 700, kv_lengths=np.array([300], np.int32)), 1)
    assert [bool(is_set(flags, FULL)) for *_, flags in row] == [True, True, False]
    assert plan(call(1, 1, 256), 1)[0].masked == "never"
    assert plan(call(1, 1, 100), 1)[0].masked == "always"
    assert plan(call(1, 1, 300), 1)[0].masked == "sometimes"


def test_two_splits_read_equally_many_blocks() -> None:
    _, rows = plan(call(1, 1, 700), 2)
    assert [seen_blocks(row) for row in rows] == [[(0, 0), (0, 1), (0, 2)], [(0, 3), (0, 4), (0, 5)]]


# -- configurations --------------------------------------------------------------------------------------------------


def cache(
    batch: int, slots: int, heads: int, kv_heads: int, queries: int = 1, dim: int = 128, dtype: Any = jnp.bfloat16
) -> dict[str, Any]:
    shapes = {"query": (batch, queries, heads, dim), **dict.fromkeys(("key", "value"), (batch, slots, kv_heads, dim))}
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def on_tpu(given: dict[str, Any], device_kind: str = "TPU v5e") -> Any:
    inv = REGISTRY.invocation("flash_attention", **given)
    return attrs.evolve(inv, platform="tpu", device_kind=device_kind)


@pytest.mark.parametrize(
    ("given", "device", "cfg"),
    [
        (cache(64, 8192, 32, 8), "TPU v5e", Config(512, 1)),
        (cache(64, 8192, 32, 8), "TPU v5p", Config(512, 2)),
        (cache(64, 8192, 32, 8), "TPU7x", Config(1024, 1)),
        (cache(64, 8192, 32, 1), "TPU v5e", Config(2048, 1)),
        (cache(64, 8192, 32, 32), "TPU v5e", Config(128, 1)),
        (cache(64, 200, 32, 8), "TPU v5e", Config(128, 1)),
        (cache(64, 8192, 32, 8) | {"causal": True, "sliding_window": (511, 0)}, "TPU v5e", Config(256, 1)),
    ],
)
def test_a_block_has_two_or_four_mebibytes(given: dict[str, Any], device: str, cfg: Config) -> None:
    assert flash_attention_decode.heuristic_cfg(on_tpu(given, device)) == cfg


@pytest.mark.parametrize("device", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [64, 128, 192])
def test_every_configuration_fits(device: str, dtype: str, dim: int) -> None:
    inv = on_tpu(cache(8, 4096, 32, 8, 16, dim, dtype), device)
    space = list(flash_attention_decode.config_space(inv))
    assert len({*space}) == len(space) > 0
    assert all(_tuning.vmem_bytes(inv, cfg.k_block) <= KINDS[device].budget for cfg in space)


def test_every_configuration_has_the_same_results() -> None:
    given = call(1, 3, 600, causal=True)
    space = list(flash_attention_decode.config_space(on_tpu(given, "TPU v4")))
    assert {cfg.splits for cfg in space} == {1, 2}
    assert len(space) > 2
    for cfg in space:
        compare(given, cfg)


LENGTH = {"kv_lengths": jax.ShapeDtypeStruct((4,), jnp.int32)}
RING = {
    "q_start": jax.ShapeDtypeStruct((4,), jnp.int32),
    "kv_positions": jax.ShapeDtypeStruct((4, 3000), jnp.int32),
}
LOWERED = {
    "lengths": cache(4, 3000, 32, 8) | LENGTH,
    "ring": cache(4, 3000, 32, 8, 4) | RING | {"causal": True, "sliding_window": (100, 0)},
    "plain": cache(4, 3000, 8, 1, 16) | {"logits_soft_cap": 30.0},
    "sinks": cache(4, 3000, 16, 16, 2) | LENGTH | {"softmax_aux": jax.ShapeDtypeStruct((16, 1), jnp.bfloat16)},
    "odd heads": cache(4, 3000, 9, 3) | LENGTH,
    "wide heads": cache(4, 3000, 8, 4, dim=256) | LENGTH,
    "narrow heads": cache(4, 3000, 8, 4, dim=80) | LENGTH,
    "float32": cache(4, 3000, 8, 4, dtype=jnp.float32) | LENGTH,
    "few slots": cache(4, 70, 8, 4) | LENGTH,
}


def lower(given: dict[str, Any], device_kind: str, **named: Any) -> Any:
    arrays = {name: x for name, x in given.items() if isinstance(x, jax.ShapeDtypeStruct)}
    options = {name: x for name, x in given.items() if name not in arrays}
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind, 1, "tpu"))
    attend = jax.jit(lambda arrays: core.call("flash_attention", **arrays, **options, **named))
    with use_abstract_mesh(mesh):
        return attend.trace(arrays).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("device_kind", DEVICES)
@pytest.mark.parametrize("name", LOWERED)
def test_every_configuration_lowers(name: str, device_kind: str) -> None:
    for cfg in flash_attention_decode.config_space(on_tpu(LOWERED[name], device_kind)):
        for return_lse in (False, True):
            text = lower(LOWERED[name], device_kind, backend=BACKEND, cfg=cfg, return_lse=return_lse).as_text()
            assert text.count("tpu_custom_call") == 1


# -- the choice ------------------------------------------------------------------------------------------------------


def chosen(given: dict[str, Any]) -> str:
    (label,) = find_labels_in_lowered(lower(given, "TPU v5e"))
    return str(label.backend)


def test_few_queries_come_here() -> None:
    assert chosen(LOWERED["lengths"]) == BACKEND
    assert chosen(LOWERED["ring"]) == BACKEND
    assert chosen(cache(4, 3000, 32, 8, 16)) == BACKEND
    assert chosen(cache(4, 3000, 32, 8, 17)) == "pallas_tpu"


MASK = np.ones((1, 1, 1, 300), bool)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (call(queries=17), "takes up to 16 queries; not 17"),
        (call(bias=MASK.astype(np.float32)), "takes no bias"),
        (call(attention_mask=MASK), "takes no attention_mask"),
        (
            call(q_segment_ids=np.ones((2, 1), np.int32), kv_segment_ids=np.ones((2, 300), np.int32)),
            "takes no q_segment_ids",
        ),
        (call(dropout_prob=0.1, dropout_seed=1), "does no dropout"),
        (call(slots=0), "takes no arrays without elements"),
        (cache(1, 300, 4, 2, dtype=jnp.float16), "not float16"),
        (cache(1, 300, 4, 2, dim=520), "head dims up to 512"),
        (cache(128, 2**20, 4, 2), "too many visits"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_other_calls_are_refused_with_the_reason(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        flash_attention_decode.heuristic_cfg(on_tpu(given))


def test_packed_sequences_are_refused() -> None:
    bounds = np.array([0, 1], np.int32)
    given = {name: x[0] for name, x in call(1).items() if name in ("query", "key", "value")}
    with pytest.raises(Unsupported, match="takes no cum_seqlens_q"):
        flash_attention_decode.heuristic_cfg(on_tpu(given | {"cum_seqlens_q": bounds, "cum_seqlens_k": bounds}))


def test_other_devices_are_refused() -> None:
    with pytest.raises(Unsupported, match="run on TPUs; this is gpu"):
        flash_attention_decode.heuristic_cfg(attrs.evolve(on_tpu(call()), platform="gpu"))


def test_an_argument_that_a_kernel_does_not_take_is_checked_in_the_interpreter_too() -> None:
    inv = attrs.evolve(on_tpu(call(queries=17)), platform="cpu")
    with pytest.raises(Unsupported, match="takes up to 16 queries"):
        flash_attention_decode.check_cfg(inv, Config(interpret=True))
    flash_attention.check_cfg(inv, flash_attention.Config(interpret=True))
