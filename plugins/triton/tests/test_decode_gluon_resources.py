"""The resources of the decode kernel for Hopper: configurations and features, compiled by Triton alone.

What the tests measure before the long sweep is in `decode_gluon_resources.json`, with a hash of what decides it.
`python -m plugins.triton.tests.test_decode_gluon_resources` writes the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import jax
import pytest

import ejkernel_core
from ejkernel_core import Invocation
from ejkernel_triton import flash_attention_decode_sm90 as decode
from ejkernel_triton.flash_attention_decode_sm90 import _tiling
from ejkernel_triton.flash_attention_sm90._launch import width
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.split_keys import shapes
from plugins.triton.tests.hopper_launches import Figures, Launch, Lock, record_launches

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

LOCK = Lock.read(Path(__file__).with_name("decode_gluon_resources.json"))
BATCH, HEADS, KV_HEADS, SLOTS = 16, 32, 8, 8192
INTEGERS = {name: jax.ShapeDtypeStruct((BATCH,), "int32") for name in ("q_start", "kv_lengths")}
FULL = {"causal": True, "sliding_window": (1023, 0), "logits_soft_cap": 30.0, **INTEGERS}
SINKS = {"softmax_aux": jax.ShapeDtypeStruct((HEADS, 2), "float32")}
#: Queries, head dim, and what else a call has.
CALLS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    *((queries, dim, {}) for dim in (64, 128, 256) for queries in (1, 16)),
    *((4, dim, FULL) for dim in (96, 128, 192)),
    (16, 256, FULL),
    *((queries, 128, FULL | SINKS) for queries in (1, 8, 16)),
)
QUICK = ((1, 128, {}), (16, 128, {}))


def invocation(queries: int, dim: int, options: dict[str, Any]) -> Invocation:
    shapes = {"query": (queries, HEADS), "key": (SLOTS, KV_HEADS), "value": (SLOTS, KV_HEADS)}
    given = {name: jax.ShapeDtypeStruct((BATCH, *sizes, dim), "bfloat16") for name, sizes in shapes.items()}
    inv = ejkernel_core.invocation("flash_attention", **given, **options)
    return attrs.evolve(inv, platform="gpu", device_kind="NVIDIA H200", compute_capability=(9, 0))


def launched(launches: list[Launch], inv: Invocation, cfg: decode.Config) -> Launch:
    """The launch of a call that reads the keys."""
    launches.clear()
    decode.check_cfg(inv, cfg)
    arrays = {name: x for name, x in inv.arguments.items() if hasattr(x, "shape")}
    jax.eval_shape(lambda arrays: decode.run_backend(inv.with_arrays(arrays), cfg), arrays)
    return attrs.evolve(launches[0], products=products_of_a_step(inv, cfg))


def products_of_a_step(inv: Invocation, cfg: decode.Config) -> int:
    """Each multiplies 16 of the columns of keys, or 16 keys. The assembler removes those of columns that are padding.
    Of 64 rows, one has all keys, or all columns of the values.
    """
    dim = inv["query"].shape[3]
    if _tiling.problem(inv).rows == shapes.MANY_ROWS:
        return width(dim) // 16 + cfg.block // 16
    return cfg.block // 64 * (width(dim) // 16) + -(-dim // 64) * (cfg.block // 16)


def check(figures: Figures, inv: Invocation, cfg: decode.Config) -> None:
    # The warp that fetches has room for three more.
    assert figures.num_warps == cfg.num_warps * _tiling.problem(inv).together[cfg.programs - 1] + 4
    # So many programs have room.
    assert figures.registers * figures.num_warps * 32 * cfg.programs <= 64 << 10
    assert figures.shared_memory <= decode.shared_memory(inv, cfg)["attend"] <= 227 * 1024 // cfg.programs
    # XLA makes graphs of several launches, which must not allocate.
    assert not figures.scratch
    # Boxes of 64 columns, of keys and of values.
    assert figures.words["cp.async.bulk.tensor"] == 2 * width(inv["query"].shape[3]) // 64
    # Outside of the loops, with two tiles of head dim 256.
    assert max(figures.spilled) <= 40
    rows = _tiling.problem(inv).rows
    together = _tiling.problem(inv).together[cfg.programs - 1]
    assert len(figures.loops) == together
    for loop in figures.loops:
        assert (loop.loads, loop.stores) <= (together - 1, 0)
        # One for each product; with 64 rows, while the first is waited for, the second may run.
        assert loop.waits == ((1, 0) if rows == shapes.MANY_ROWS else (0, 0))


def name_of(call: tuple[int, int, dict[str, Any]]) -> str:
    queries, dim, options = call
    return " ".join([f"{queries} queries D{dim}", *options])


@pytest.mark.parametrize("call", QUICK, ids=name_of)
def test_the_heuristic_configuration_compiles_for_hopper(launches: list[Launch], call: tuple[Any, ...]) -> None:
    inv = invocation(*call)
    cfg = decode.heuristic_cfg(inv)
    check(LOCK.get(launched(launches, inv, cfg)), inv, cfg)


@pytest.mark.long
@pytest.mark.parametrize("call", CALLS, ids=name_of)
def test_every_configuration_compiles_for_hopper(launches: list[Launch], call: tuple[Any, ...]) -> None:
    inv = invocation(*call)
    for cfg in decode.config_space(inv):
        launch = launched(launches, inv, cfg)
        figures = launch.compile()
        check(figures, inv, cfg)
        assert LOCK.figures.get(launch.digest) in (None, figures), f"{LOCK.file.name} differs"


def recorded_launches(launches: list[Launch]) -> Iterator[tuple[str, Launch]]:
    for call in QUICK:
        inv = invocation(*call)
        yield name_of(call), launched(launches, inv, decode.heuristic_cfg(inv))


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as monkeypatch:
        LOCK.write(recorded_launches(record_launches(monkeypatch)))
