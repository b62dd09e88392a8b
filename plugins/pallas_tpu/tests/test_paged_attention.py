"""Attention over pages on TPUs, through Pallas' interpreters: compared with NumPy in float64.

``EJKERNEL_RANDOM_CALLS=200 pytest plugins/pallas_tpu/tests/test_paged_attention.py -k more`` runs two hundred calls.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import ejkernel_core as core
from ejkernel_core import Unsupported
from ejkernel_ops import paged_attention_metadata
from ejkernel_ops.ragged_paged_attention.examples import DECODE, MIXED, Sizes, changed, drawn
from ejkernel_ops.ragged_paged_attention.random_calls import as_dtype, check, expected, random_call
from ejkernel_pallas_tpu import ragged_paged_attention
from ejkernel_pallas_tpu.ragged_paged_attention import Config, _tuning
from ejkernel_pallas_tpu.ragged_paged_attention._plan import FIELDS, plan
from ejkernel_pallas_tpu.ragged_paged_attention._sizes import sizes
from ejkernel_pallas_tpu.testing import interpreted_registry

COUNT = int(os.environ.get("EJKERNEL_RANDOM_CALLS", "40"))
OP, BACKEND = "ragged_paged_attention", "pallas_tpu"
KERNELS = {f"{OP}.{BACKEND}": ragged_paged_attention}
REGISTRY = interpreted_registry(KERNELS)
TWO_CORES = interpreted_registry(KERNELS, device_kind="TPU v5p")
DEVICES = ("TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x")


def compute(call: Mapping[str, Any], cfg: Config | None = None, registry: Any = REGISTRY) -> tuple[Any, Any]:
    """The output and the lse."""
    results = registry.call(OP, **call, return_lse=True, backend=BACKEND, cfg=cfg)
    return tuple(np.asarray(x, np.float64) for x in results)


def compare(call: Mapping[str, Any], cfg: Config | None = None, registry: Any = REGISTRY) -> None:
    for actual, right in zip(compute(call, cfg, registry), expected(call), strict=True):
        np.testing.assert_allclose(actual, right, rtol=2e-5, atol=2e-5)


def float32(draw: Any) -> dict[str, Any]:
    return as_dtype(draw, "float32")


# -- values ----------------------------------------------------------------------------------------------------------


def fills_tiles(call: Mapping[str, Any]) -> bool:
    """Whether the rows of a slot are as XLA leaves them in main memory."""
    pages = call.get("kv_pages", call.get("key_pages"))
    _, page_size, count, _ = pages.shape
    narrow = pages.dtype.itemsize == 1
    if count == 1:
        return page_size % (32 if narrow else 16 if call["query"].dtype == jnp.bfloat16 else 8) == 0
    return count in ((4,) if narrow else (2, 4)) or count % 8 == 0


def check_random_call(seed: int, dtype: str, registry: Any = REGISTRY) -> None:
    """It is right, or refused for the order of its pages in main memory."""
    call = as_dtype(random_call(seed, 200), dtype)
    if fills_tiles(call):
        check(seed, registry=registry, backend=BACKEND, dtype=dtype, most_keys=200)
        return
    with pytest.raises(core.NoKernel, match="XLA would copy"):
        registry.call(OP, **call, backend=BACKEND)


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed: int) -> None:
    check_random_call(seed, ("float32", "bfloat16")[seed % 2], TWO_CORES if seed % 3 == 0 else REGISTRY)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60, 60 + COUNT))
def test_more_random_calls(seed: int) -> None:
    check_random_call(seed, ("float32", "bfloat16")[seed % 2], TWO_CORES if seed % 3 == 0 else REGISTRY)


#: Blocks of 128 slots, so that there are several, from the middle of a page on too.
BLOCKS = Sizes((1, 70, 3, 20, 0, 2), (300, 70, 257, 129, 140, 0), 16, padding=2)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"causal": False},
    "window": {"sliding_window": (100, 0)},
    "a window of a few keys": {"sliding_window": (3, 0)},
    "window to both sides": {"sliding_window": (60, 30), "causal": False},
    "cap": {"logits_soft_cap": 2.0},
    "sinks": {"softmax_aux": np.random.default_rng(3).normal(size=(4, 2))},
    "two sequences": {"num_seqs": np.int32(2)},
}


@pytest.mark.parametrize("registry", [REGISTRY, TWO_CORES], ids=["one core", "two cores"])
@pytest.mark.parametrize("q_tile", [1, 8, 32])
@pytest.mark.parametrize("name", OPTIONS)
def test_blocks_that_are_masked_full_and_not_seen(name: str, q_tile: int, registry: Any) -> None:
    compare(float32(drawn(BLOCKS, 0) | OPTIONS[name]), Config(q_tile, 128), registry)


@pytest.mark.parametrize(("page_size", "k_block"), [(1, 128), (3, 384), (24, 384), (64, 256), (256, 128), (1024, 256)])
def test_blocks_of_pages_and_parts_of_pages(page_size: int, k_block: int) -> None:
    compare(float32(drawn(Sizes((2, 1, 5), (260, 600, 40), page_size), 1)), Config(2, k_block))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kv_heads", "is_pair"), [(1, True), (1, False), (2, True), (4, False), (8, True), (12, False)]
)
def test_every_head_has_its_own_keys(kv_heads: int, is_pair: bool, dtype: str) -> None:
    """Heads that share words of 16 bits, and more than are unrolled."""
    call = as_dtype(drawn(Sizes((1, 3), (150, 20), 16, 3 * kv_heads, kv_heads, 32), 2), dtype)
    if is_pair:
        pages = call.pop("kv_pages")
        call |= {"key_pages": pages[:, :, ::2], "value_pages": pages[:, :, 1::2]}
    for actual, right in zip(compute(call, Config(4, 128)), expected(call), strict=True):
        np.testing.assert_allclose(actual, right, rtol=0, atol=2e-5 if dtype == "float32" else 3e-2)


def test_a_nan_that_is_seen_reaches_the_results_of_its_head_alone() -> None:
    call = float32(drawn(DECODE, 0))
    page = int(call["block_tables"][2, 3])
    call["kv_pages"] = call["kv_pages"].at[page, 1, 2].set(jnp.nan)  # the key of head 1
    out, _ = compute(call)
    assert np.isnan(out[2, 2:]).all()
    assert np.isfinite(np.delete(out, 2, 0)).all()
    assert np.isfinite(out[2, :2]).all()


def test_metadata_has_the_tiles() -> None:
    call = float32(drawn(MIXED, 2))
    starts = call["query_start_loc"]
    metadata = paged_attention_metadata(call["kv_lens"], starts, num_tokens=call["query"].shape[0])
    for q_tile in (1, 16):
        alone = compute(call, Config(q_tile, 128))
        # The kernel reads it: with that of other lengths, another token would be left out.
        other = paged_attention_metadata(call["kv_lens"], starts, np.int32(2), num_tokens=call["query"].shape[0])
        with_metadata, with_other = (compute(call | {"metadata": x}, Config(q_tile, 128)) for x in (metadata, other))
        np.testing.assert_array_equal(alone[0], with_metadata[0])
        assert (with_other[0][8:] == 0).all()


@pytest.mark.parametrize("queries", [1, 7])
def test_a_sequence_has_the_same_bits_alone_and_among_others(queries: int) -> None:
    """Whatever the other sequences are, how many there are, and how wide their table is."""
    keys = (300, 9, 129, 257, 7, 40, 1000, 128, 64)
    call = float32(drawn(Sizes((queries,) * 9, keys, 16), 3)) | {"split_size": 128, "max_query_len": queries}
    together = compute(call)
    for place in (0, 3, 4):
        own, pages = slice(place * queries, (place + 1) * queries), -(-keys[place] // 16)
        alone = {
            **call,
            "query": call["query"][own],
            "kv_lens": call["kv_lens"][place : place + 1],
            "block_tables": call["block_tables"][place : place + 1, :pages],
            "query_start_loc": np.array([0, queries], np.int32),
        }
        out, lse = compute(alone)
        np.testing.assert_array_equal(out, together[0][own])
        # XLA on a CPU has another logarithm for the last few elements of a loop.
        np.testing.assert_allclose(lse, together[1][:, own], rtol=3e-7)


# -- with races detected ---------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_memory() -> Iterator[None]:
    pltpu.reset_tpu_interpret_mode_state()
    yield
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("device_kind", ["TPU v5e", "TPU v5p"])
@pytest.mark.parametrize("options", [{}, {"sliding_window": (100, 0)}], ids=["plain", "window"])
def test_buffers_are_copied_to_while_they_are_not_read(options: Any, device_kind: str, fresh_memory: None) -> None:
    """In the interpreter of a whole TPU, whose memory begins as NaN."""
    registry = interpreted_registry(KERNELS, device_kind=device_kind, races=True)
    sequences = Sizes((1, 0, 9, 2, 1), (300, 30, 140, 0, 17), 16, padding=1)
    compare(float32(drawn(sequences, 4) | options), Config(4, 128), registry)


# -- the plan --------------------------------------------------------------------------------------------------------


def planned(cores: int, q_tile: int = 8, **options: Any) -> list[dict[str, int]]:
    call = float32(drawn(BLOCKS, 0)) | options
    inv = core.invocation(OP, **call)
    inv = inv.with_arrays({name: jnp.asarray(call[name]) for name in call if hasattr(call[name], "shape")})
    result = plan(inv, sizes(inv, q_tile, 128), cores)
    rows = np.asarray(result.numbers).reshape(len(FIELDS), -1).T
    steps = int(result.steps)
    return [dict(zip(FIELDS, map(int, row), strict=True)) for row in rows[: steps * cores]]


def test_a_tile_sees_what_its_queries_see() -> None:
    tiles = planned(1, sliding_window=(100, 0))
    assert [tile["sequence"] for tile in tiles] == [0, *[1] * 9, 2, 3, 3, 3, 5]
    last = tiles[9]  # tokens 64 to 69 of the second sequence
    assert (last["position"], last["queries"], last["first_slot"], last["end_slot"]) == (64, 6, 0, 70)
    assert (tiles[0]["first_slot"], tiles[0]["end_slot"]) == (199, 300)
    assert (tiles[-1]["first_slot"], tiles[-1]["end_slot"]) == (0, 0)


@pytest.mark.parametrize("cores", [1, 2])
def test_each_core_has_its_own_chain_of_blocks(cores: int) -> None:
    tiles = planned(cores)
    for core_number in range(cores):
        own = list(range(core_number, len(tiles), cores))
        before = 0
        for tile in own:
            numbers = tiles[tile]
            assert numbers["before"] == before
            before += -(-numbers["end_slot"] // 128) - numbers["first_slot"] // 128
            later = [other for other in own if other > tile and tiles[other]["end_slot"]]
            assert numbers["following"] == (later[0] if later else -1)


# -- programs --------------------------------------------------------------------------------------------------------

CALLS = {example.name: example for example in ragged_paged_attention.examples()}


def lowered(name: str, device_kind: str, cfg: Config | None = None) -> str:
    call = CALLS[name].abstract()
    arrays = {name: x for name, x in call.items() if isinstance(x, jax.ShapeDtypeStruct)}
    options = {name: x for name, x in call.items() if name not in arrays}
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind, 1, "tpu"))
    attention = jax.jit(partial(core.call, OP, **options, backend=BACKEND, cfg=cfg))
    with use_abstract_mesh(mesh):
        return str(attention.trace(**arrays).lower(lowering_platforms=("tpu",)).as_text())


def on_tpu(call: Mapping[str, Any], device_kind: str = "TPU v5e") -> Any:
    inv = core.registry.invocation(OP, **call)
    return attrs.evolve(inv, platform="tpu", device_kind=device_kind, compute_capability=None)


@pytest.mark.parametrize("device_kind", DEVICES)
@pytest.mark.parametrize("name", [name for name, example in CALLS.items() if "vmem" in example.uses])
def test_every_configuration_lowers(name: str, device_kind: str) -> None:
    space = list(ragged_paged_attention.config_space(on_tpu(CALLS[name].abstract(), device_kind)))
    assert len({*space}) == len(space) > 0
    for cfg in space if device_kind == "TPU v5e" else space[:1]:
        assert lowered(name, device_kind, cfg).count("@tpu_custom_call") == 1


def test_pages_of_layers_are_not_copied_in_a_scan() -> None:
    """Each layer has its own part of the pages, from ``first_page`` on. All of them go to the kernel as they are."""
    shape = (3 * 64, 16, 8, 128)
    call = CALLS["a pair in float32"].abstract()
    arrays = {name: call[name] for name in ("kv_lens", "block_tables", "query_start_loc")}

    def step(query: Any, pool: Any, tables: Any) -> Any:
        def layer(query: Any, number: Any) -> Any:
            return core.call(OP, query, pool, **tables, first_page=64 * number, backend=BACKEND), None

        return jax.lax.scan(layer, query, jnp.arange(3))[0]

    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("TPU v5e", 1, "tpu"))
    query = jax.ShapeDtypeStruct((16, 16, 128), jnp.bfloat16)
    with use_abstract_mesh(mesh):
        traced = jax.jit(step).trace(query, jax.ShapeDtypeStruct(shape, jnp.bfloat16), arrays)
        text = str(traced.lower(lowering_platforms=("tpu",)).as_text())
    kinds = {
        kind
        for kind, result in re.findall(r" = ([\w.]+) .*tensor<([\dx]+)xbf16>\)?$", text, re.MULTILINE)
        if np.prod([int(axis) for axis in result.split("x")]) >= np.prod(shape)
    }
    assert kinds <= {"call", "sdy.sharding_constraint"}, kinds


# -- configurations and refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "device", "cfg"),
    [
        ("16 x 4096 keys, 1 queries", "TPU v5e", Config(1, 512)),
        ("16 x 4096 keys, 1 queries", "TPU7x", Config(1, 1024)),
        ("16 x 4096 keys, 4 queries", "TPU v5e", Config(4, 512)),
        ("2 x 2048 keys, 512 queries", "TPU v5e", Config(128, 512)),
        ("pages of 3", "TPU v5e", Config(4, 384)),
    ],
)
def test_tiles_are_as_long_as_sequences_have_queries(name: str, device: str, cfg: Config) -> None:
    assert ragged_paged_attention.heuristic_cfg(on_tpu(CALLS[name].abstract(), device)) == cfg


@pytest.mark.parametrize("device", DEVICES)
def test_every_configuration_fits(device: str) -> None:
    for example in CALLS.values():
        inv = on_tpu(example.abstract(), device)
        budget = _tuning._chip(inv).budget
        assert all(ragged_paged_attention.vmem(inv, cfg) <= budget for cfg in ragged_paged_attention.config_space(inv))


def test_with_split_size_there_is_one_configuration_for_all_calls() -> None:
    spaces = []
    for name in ("16 x 4096 keys, 1 queries", "64 x 8192 keys, 1 queries", "2 x 2048 keys, 512 queries"):
        inv = on_tpu(CALLS[name].abstract() | {"split_size": 256})
        spaces.append(list(ragged_paged_attention.config_space(inv)))
        with pytest.raises(Unsupported, match="with split_size, all calls of these heads and pages have Config"):
            ragged_paged_attention.check_cfg(inv, Config(1, 256))
    assert spaces == [[Config(8, 512)]] * 3


GIVEN = float32(drawn(MIXED, 0))
PAGES = GIVEN["kv_pages"]


def shape(*sizes: int, dtype: str = "float32") -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"query": GIVEN["query"].astype("float16"), "kv_pages": PAGES.astype("float16")}, "these are float16"),
        ({"kv_pages": shape(8, 4, 6, 64), "query": shape(34, 3, 64)}, "1, 2, 4 or a multiple of 8 rows .* not 6"),
        (
            {"kv_pages": shape(8, 4, 2, 64, dtype="int8"), "query": shape(34, 3, 64)},
            "1, 4 or a multiple of 8 rows .* not 2",
        ),
        ({"kv_pages": shape(8, 4, 4, 640), "query": shape(34, 4, 640)}, "head dims up to 512, not 640"),
        ({"query": shape(0, 4, 64)}, "no call without tokens"),
        ({"block_tables": shape(5, 2**18, dtype="int32")}, "a table of 5 x 262144 pages .* KiB of scalar memory"),
        ({"kv_pages": shape(8, 5001, 16, 512), "query": shape(34, 8, 512)}, "pages of 5001 slots need .* MiB"),
    ],
)
def test_calls_that_it_does_not_take(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        ragged_paged_attention.heuristic_cfg(on_tpu(GIVEN | changes))


def test_a_pair_of_one_head_has_pages_of_whole_tiles() -> None:
    call = {name: GIVEN[name] for name in GIVEN if name != "kv_pages"} | {"query": shape(34, 4, 64)}
    for page_size in (4, 8):
        inv = on_tpu(call | dict.fromkeys(("key_pages", "value_pages"), shape(8, page_size, 1, 64)))
        if page_size == 8:
            assert ragged_paged_attention.heuristic_cfg(inv).k_block % 128 == 0
        else:
            with pytest.raises(Unsupported, match="have a multiple of 8 slots: XLA would copy those of 4"):
                ragged_paged_attention.heuristic_cfg(inv)


def test_blocks_are_pages_or_parts_of_one() -> None:
    inv = on_tpu(GIVEN | {"kv_pages": shape(8, 24, 4, 64)})
    with pytest.raises(Unsupported, match="a block of 128 slots is neither some pages of 24 slots nor a part of one"):
        ragged_paged_attention.check_cfg(inv, Config(1, 128))
    inv = on_tpu(GIVEN | {"kv_pages": shape(8, 16, 4, 64)})
    with pytest.raises(Unsupported, match=r"k_block=131072, .* needs \d+.\d MiB of vector memory, of which there are"):
        ragged_paged_attention.check_cfg(inv, Config(1, 2**17))
    with pytest.raises(ValueError, match="k_block: takes a multiple of 128; got 100"):
        Config(k_block=100)
    with pytest.raises(ValueError, match="q_tile"):
        Config(q_tile=3)


def test_other_devices_are_refused_unless_it_is_interpreted() -> None:
    inv = attrs.evolve(on_tpu(GIVEN), platform="cpu", device_kind="cpu")
    with pytest.raises(Unsupported, match="the Pallas TPU kernels run on TPUs; this is cpu"):
        ragged_paged_attention.check_cfg(inv, Config())
    compare(GIVEN, Config(2, 128, interpret=True), core.registry)


def test_layers_of_one_array() -> None:
    """The pages of the last of three, behind NaN."""
    layer = changed(
        partial(drawn, MIXED),
        lambda call, rng: {
            "kv_pages": np.concatenate([np.full_like(call["kv_pages"], np.nan), call["kv_pages"]]),
            "first_page": np.int32(len(call["kv_pages"])),
        },
    )
    compare(float32(layer(0)))
