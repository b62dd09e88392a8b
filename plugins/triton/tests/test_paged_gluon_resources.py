"""The resources of attention over pages on Hopper: configurations and features, compiled by Triton alone.

What the tests measure before the long sweep is in `paged_gluon_resources.json`, with a hash of what decides it.
`python -m plugins.triton.tests.test_paged_gluon_resources` writes the file.
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
from ejkernel_triton import ragged_paged_attention_sm90 as paged
from ejkernel_triton.flash_attention_sm90._launch import width
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.ragged_paged_attention_sm90 import _tiling
from ejkernel_triton.split_keys import shapes
from plugins.triton.tests.hopper_launches import Figures, Launch, Lock, record_launches

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

LOCK = Lock.read(Path(__file__).with_name("paged_gluon_resources.json"))
SEQUENCES, KV_HEADS, PAGES, PAGE_SIZE = 16, 8, 128, 64
PARTS = {"split_size": 512}
SCALES = {name: jax.ShapeDtypeStruct((KV_HEADS,), "float32") for name in ("k_scale", "v_scale")}
FP8, INT8 = ({"pages": dtype, **SCALES} for dtype in ("float8_e4m3fn", "int8"))
FULL = {"sliding_window": (1023, 0), "logits_soft_cap": 30.0}
#: The heads of a key head, the queries of a sequence, head dim, and what else a call has.
CALLS: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
    *((4, 1, dim, PARTS) for dim in (64, 128, 256)),
    (4, 1, 128, FULL | PARTS),
    (32, 1, 128, PARTS),
    (32, 1, 256, PARTS),
    (64, 1, 128, PARTS),
    *((4, 1, dim, FP8) for dim in (64, 96, 128, 256)),
    (4, 1, 128, FULL | FP8 | PARTS),
    *((group, 1, 128, FP8) for group in (16, 32, 64)),
    (32, 1, 256, FP8),
    (4, 64, 128, FP8),
    (4, 1, 128, INT8),
)
QUICK = ((4, 1, 128, PARTS), (4, 1, 128, FP8))


def invocation(group: int, queries: int, dim: int, options: dict[str, Any]) -> Invocation:
    shape = lambda *sizes, dtype="int32": jax.ShapeDtypeStruct(sizes, dtype)
    own = dict(options)
    dtype = own.pop("pages", "bfloat16")
    given = {
        "query": shape(SEQUENCES * queries, group * KV_HEADS, dim, dtype="bfloat16"),
        "kv_pages": shape(SEQUENCES * PAGES, PAGE_SIZE, 2 * KV_HEADS, dim, dtype=dtype),
        "kv_lens": shape(SEQUENCES),
        "block_tables": shape(SEQUENCES, PAGES),
        "query_start_loc": shape(SEQUENCES + 1),
        "max_query_len": queries,
    }
    inv = ejkernel_core.invocation("ragged_paged_attention", **given, **own)
    return attrs.evolve(inv, platform="gpu", device_kind="NVIDIA H200", compute_capability=(9, 0))


def launched(launches: list[Launch], inv: Invocation, cfg: paged.Config) -> Launch:
    """The launch of a call that reads the keys."""
    launches.clear()
    paged.check_cfg(inv, cfg)
    arrays = {name: x for name, x in inv.arguments.items() if hasattr(x, "shape")}
    jax.eval_shape(lambda arrays: paged.run_backend(inv.with_arrays(arrays), cfg), arrays)
    return attrs.evolve(launches[0], products=products_of_a_step(inv, cfg))


def products_of_a_step(inv: Invocation, cfg: paged.Config) -> int:
    """As in the decode kernel: each multiplies 16 of the columns of keys, or 16 keys. Of pages of 8 bits, 16 of the even
    columns or of the odd ones, and 64 of the even or odd columns of values.
    """
    dim = inv["query"].shape[2]
    if _tiling.itemsize(inv) == 1:
        return cfg.block // 64 * (width(dim) // 16) + 2 * (_tiling.widths(inv)[1] // 128) * (cfg.block // 16)
    if _tiling.problem(inv).rows == shapes.MANY_ROWS:
        return width(dim) // 16 + cfg.block // 16
    return cfg.block // 64 * (width(dim) // 16) + -(-dim // 64) * (cfg.block // 16)


def check(figures: Figures, inv: Invocation, cfg: paged.Config) -> None:
    # The warp that fetches has room for three more.
    together = _tiling.problem(inv).together[cfg.programs - 1]
    assert figures.num_warps == cfg.num_warps * together + 4
    # So many programs have room.
    assert figures.registers * figures.num_warps * 32 * cfg.programs <= 64 << 10
    assert figures.shared_memory <= paged.shared_memory(inv, cfg)["attend"] <= 227 * 1024 // cfg.programs
    # XLA makes graphs of several launches, which must not allocate.
    assert not figures.scratch
    assert len(figures.loops) == together
    # While bytes become float16, there are few registers left.
    most = 3 if _tiling.itemsize(inv) == 1 else 0
    assert all(max(loop.loads, loop.stores) <= most for loop in figures.loops)


def name_of(call: tuple[int, int, int, dict[str, Any]]) -> str:
    group, queries, dim, options = call
    words = (str(x) for name, x in options.items() if name not in SCALES)
    return " ".join([f"group {group} {queries} queries D{dim}", *words])


@pytest.mark.parametrize("call", QUICK, ids=name_of)
def test_the_heuristic_configuration_compiles_for_hopper(launches: list[Launch], call: tuple[Any, ...]) -> None:
    inv = invocation(*call)
    cfg = paged.heuristic_cfg(inv)
    check(LOCK.get(launched(launches, inv, cfg)), inv, cfg)


@pytest.mark.long
@pytest.mark.parametrize("call", CALLS, ids=name_of)
def test_every_configuration_compiles_for_hopper(launches: list[Launch], call: tuple[Any, ...]) -> None:
    inv = invocation(*call)
    for cfg in paged.config_space(inv):
        launch = launched(launches, inv, cfg)
        figures = launch.compile()
        check(figures, inv, cfg)
        assert LOCK.figures.get(launch.digest) in (None, figures), f"{LOCK.file.name} differs"


def recorded_launches(launches: list[Launch]) -> Iterator[tuple[str, Launch]]:
    for call in QUICK:
        inv = invocation(*call)
        yield name_of(call), launched(launches, inv, paged.heuristic_cfg(inv))


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as monkeypatch:
        LOCK.write(recorded_launches(record_launches(monkeypatch)))
