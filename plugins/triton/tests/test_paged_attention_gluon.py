"""Attention over pages by the kernel for Hopper, through the interpreter, which draws the order of copies, warps and
products: compared with NumPy in float64.

``EJKERNEL_RANDOM_CALLS=200 pytest plugins/triton/tests/test_paged_attention_gluon.py -k more`` runs two hundred calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import Unsupported
from ejkernel_ops.ragged_paged_attention.examples import MIXED, Sizes, drawn
from ejkernel_ops.ragged_paged_attention.random_calls import as_dtype, check, expected, random_call
from ejkernel_triton import ragged_paged_attention
from ejkernel_triton import ragged_paged_attention_sm90 as paged
from ejkernel_triton.gluon import requirements
from ejkernel_triton.interpreter import interpreted, interpreted_registry
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability_by_name
from ejkernel_triton.ragged_paged_attention_sm90 import Config, _launch, _tiling
from plugins.triton.tests.paged_calls import alone

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

COUNT = int(os.environ.get("EJKERNEL_RANDOM_CALLS", "40"))
OP, BACKEND = "ragged_paged_attention", "gluon_sm90"
REGISTRY = interpreted_registry({f"{OP}.{BACKEND}": paged, f"{OP}.triton": ragged_paged_attention})
REFUSED = frozenset({"fp8_query"})
PAGE_SIZES = (8, 16, 32, 64, 128, 256)
#: One split; fewer than there are blocks; more. The first is the heuristic.
CONFIGS = (None, Config(1, 64, 2, 4, 2), Config(2, 64, 3, 4, 1), Config(4, 128, 1, 4, 1), Config(16, 64, 1, 4, 2))


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    """Three programs compute all parts of a call. The interpreter needs no version of jax-triton that takes Gluon."""
    with pytest.MonkeyPatch.context() as patch, interpreted():
        patch.setattr(requirements, "_unavailable_reason", lambda: None)
        for module in (_launch, _tiling):
            patch.setattr(module, "multiprocessors", lambda inv: 3)
        yield


def call(sizes: Sizes, **options: Any) -> dict[str, Any]:
    return as_dtype(drawn(sizes, 3), "float16") | options


def on_card(given: dict[str, Any], card: str = "NVIDIA H200") -> Any:
    """The invocation that the kernel gets on a card."""
    inv = REGISTRY.invocation(OP, **given)
    return attrs.evolve(inv, platform="gpu", device_kind=card, compute_capability=capability_by_name(card))


def shapes_of(sequences: int, keys: int, queries: int) -> dict[str, Any]:
    """A call of 32 heads on 8, with pages of 64 tokens."""
    shape = lambda *sizes, dtype="int32": jax.ShapeDtypeStruct(sizes, dtype)
    pages = keys // 64
    return {
        "query": shape(sequences * queries, 32, 128, dtype="bfloat16"),
        "kv_pages": shape(sequences * pages, 64, 16, 128, dtype="bfloat16"),
        "kv_lens": shape(sequences),
        "block_tables": shape(sequences, pages),
        "query_start_loc": shape(sequences + 1),
        "max_query_len": queries,
    }


def compute(given: dict[str, Any], cfg: Any = None) -> tuple[np.ndarray, np.ndarray]:
    out, lse = REGISTRY.call(OP, **given, return_lse=True, backend=BACKEND, cfg=cfg)
    return np.asarray(out), np.asarray(lse)


def compare(given: dict[str, Any], cfg: Any = None) -> None:
    out, lse = REGISTRY.call(OP, **given, return_lse=True, backend=BACKEND, cfg=cfg)
    right_out, right_lse = expected(given)
    np.testing.assert_allclose(np.asarray(out, np.float64), right_out, rtol=3e-3, atol=3e-3)
    np.testing.assert_allclose(np.asarray(lse), right_lse, rtol=2e-5, atol=2e-5)


# -- values ----------------------------------------------------------------------------------------------------------


def check_random_call(seed: int, most_keys: int) -> None:
    """In one of the configurations of the call, with NaN in all that no token sees, and the same bits twice."""
    dtype = ("bfloat16", "float16")[seed % 2]
    limits = {"most_keys": most_keys, "without": REFUSED, "page_sizes": PAGE_SIZES}
    space = [*paged.config_space(on_card(as_dtype(random_call(seed, **limits), dtype)))]
    check(seed, registry=REGISTRY, backend=BACKEND, cfg=space[seed % len(space)], dtype=dtype, **limits)


@pytest.mark.parametrize("seed", range(30))
def test_random_calls(seed: int) -> None:
    check_random_call(seed, 300)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30, 30 + COUNT))
def test_more_random_calls(seed: int) -> None:
    check_random_call(seed, 600)


@pytest.mark.parametrize("cfg", CONFIGS)
@pytest.mark.parametrize("page_size", [8, 32, 64, 128])
def test_pieces_of_blocks(page_size: int, cfg: Config | None) -> None:
    """Several pages of a block, one, and a part of one; lengths that end within a page and at its end."""
    sizes = Sizes((1, 1, 5, 1), (128, 133, 70, 1), page_size, padding=3)
    compare(call(sizes), cfg)
    compare(call(sizes, sliding_window=(37, 0)), cfg)


@pytest.mark.parametrize("cfg", CONFIGS)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (5, 1), (16, 1)])
def test_tiles_of_tokens(heads: tuple[int, int], cfg: Config | None) -> None:
    """One tile and many, with padding of rows and tokens."""
    compare(call(Sizes((70, 1, 9), (90, 30, 9), 16, *heads, padding=5)), cfg)


@pytest.mark.parametrize("cfg", CONFIGS)
@pytest.mark.parametrize("heads", [4, 33])
def test_keys_before_a_window_are_not_used(heads: int, cfg: Config | None) -> None:
    """They are NaN here, and the entries of their pages no pages. A tile of 64 rows has the values of its first block in
    flight with the next product.
    """
    given = call(Sizes((2, 3), (290, 60), 8, heads, 2 if heads == 4 else 1), sliding_window=(90, 0))
    right, right_lse = expected(given)
    pages, tables = np.array(given["kv_pages"]), given["block_tables"].copy()
    for slot in range(290 - 2 - 90):
        pages[tables[0, slot // 8], slot % 8] = np.nan
    tables[0, :12], tables[0, 12:24] = -1, 2**31 - 1
    layers = {"kv_pages": np.concatenate([np.full_like(pages, np.nan), pages]), "first_page": np.int32(len(pages))}
    for changes in ({"kv_pages": pages}, layers):
        out, lse = compute(given | changes | {"block_tables": tables}, cfg)
        np.testing.assert_allclose(np.asarray(out, np.float64), right, rtol=3e-3, atol=3e-3)
        np.testing.assert_allclose(lse, right_lse, rtol=2e-5, atol=2e-5)


def test_of_a_layer_and_of_some_sequences() -> None:
    given = call(attrs.evolve(MIXED, page_size=8))
    pages = given["kv_pages"]
    layers = {"kv_pages": np.concatenate([np.full_like(pages, np.nan), pages]), "first_page": np.int32(len(pages))}
    compare(given | layers)
    compare(given | {"num_seqs": np.int32(2)})


def test_two_kernels_in_one_program() -> None:
    """The second one attends with the results of the first, in a loop over layers."""
    given = call(attrs.evolve(MIXED, page_size=8))
    pool = np.concatenate([given.pop("kv_pages")] * 3)
    query, layer_pages = given.pop("query"), len(pool) // 3

    @jax.jit
    def program(query: Any, pool: Any) -> Any:
        def layer(query: Any, number: Any) -> Any:
            options = {"kv_pages": pool, "first_page": number * layer_pages, **given}
            query = REGISTRY.call(OP, query, **options, backend="triton")
            return REGISTRY.call(OP, query, **options, sliding_window=(9, 0), backend=BACKEND), None

        return jax.lax.scan(layer, query, jax.numpy.arange(3))[0]

    right = query
    for _ in range(3):
        for options in ({}, {"sliding_window": (9, 0)}):
            right = expected({"query": right, "kv_pages": pool[:layer_pages], **given, **options})[0]
    np.testing.assert_allclose(np.asarray(program(query, pool), np.float64), right, rtol=1e-2, atol=1e-2)


# -- pages of 8 bits -------------------------------------------------------------------------------------------------


def narrow(given: dict[str, Any], dtype: str, scales: int = 2) -> dict[str, Any]:
    """The call with pages of 8 bits; what no token sees is NaN, or the lowest number."""
    pages = np.random.default_rng(4).integers(-100, 100, given["kv_pages"].shape)
    unused = np.nan if dtype == "float8_e4m3fn" else -128
    pages = np.where(np.isnan(np.asarray(given["kv_pages"], np.float32)), unused, pages)
    scale = {"k_scale": np.array([0.005, 0.02], np.float32)[:scales], "v_scale": np.array([0.5, 0.02])[:scales]}
    return given | {
        "kv_pages": pages.astype(jnp.dtype(dtype)),
        **{name: x.astype(np.float32) for name, x in scale.items()},
    }


@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 1.5}, {"softmax_scale": -0.2}], ids=str)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_scales_of_heads(dtype: str, options: dict[str, Any]) -> None:
    """In float32; the scale of keys comes before a soft cap, that of values is a factor of the output."""
    for scales in (1, 2):
        compare(narrow(call(Sizes((3, 1), (70, 33), 16), **options), dtype, scales), Config(2, 64, 2, 4, 1))


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 5, 20, 33])
def test_tiles_of_8_bits(group: int, dim: int) -> None:
    """Queries are columns in tiles of 64 rows, too; columns of values are padded to 128."""
    if group > 32 and dim > 128:
        pytest.skip("a tile has up to 32 heads")
    given = narrow(call(Sizes((2, 7), (140, 30), 16, 2 * group, 2, dim, padding=3)), "float8_e4m3fn")
    compare(given | {"v_scale": np.float32(0.05)})


@pytest.mark.parametrize("stages", [1, 2])
def test_places_of_8_bits_are_used_again(stages: int) -> None:
    """Once registers have the keys and values of a step, others are fetched into its place."""
    given = narrow(call(Sizes((2, 7), (620, 490), 64, 4, 2, 64)), "float8_e4m3fn")
    compare(given | {"v_scale": np.float32(0.05)}, Config(1, 64, stages, 4, 2))


def test_all_numbers_of_8_bits() -> None:
    """Each is the value of a slot of its own, and the weights are equal: the sums of two columns of all of them."""
    numbers = np.arange(256, dtype=np.uint8)
    for dtype, unused in (("float8_e4m3fn", (127, 255)), ("int8", ())):
        used = np.array([number for number in numbers if number not in unused])
        given = call(Sizes((1,), (len(used),), 64, 2, 1, 16))
        pages = np.zeros((8, 64, 2, 16), np.uint8)
        for slot, number in enumerate(used):
            page = given["block_tables"][0, slot // 64]
            pages[page, slot % 64, 1] = np.roll(numbers, -int(number))[:16] if dtype == "int8" else number
        given |= {"kv_pages": pages.view(jnp.dtype(dtype)), "query": jnp.zeros_like(given["query"])}
        compare(given)


def test_a_number_that_is_nan_reaches_the_result() -> None:
    given = narrow(call(Sizes((1, 1), (70, 30), 16)), "float8_e4m3fn")
    for entry in (2, 3):  # the key and the value of key head 1
        pages = np.array(given["kv_pages"])
        pages[given["block_tables"][0, 4], 5, entry] = np.nan
        out, _ = compute(given | {"kv_pages": pages})
        assert np.isnan(out[0, 2:]).all()
        assert np.isfinite(out[0, :2]).all()
        assert np.isfinite(out[1]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_queries_of_any_size(dtype: str) -> None:
    """They are multiplied by a power of 2 for each row, of which float16 has a few only."""
    given = narrow(call(Sizes((4,), (70,), 16, 2, 2)), "float8_e4m3fn")
    sizes = np.array([1e-4, 1.0, 3e-3, 0.0] if dtype == "float16" else [1e-30, 1e4, 1e-3, 0.0])[:, None, None]
    query = np.asarray(given["query"], np.float64) * sizes
    query[3, 1] = 6e-8 if dtype == "float16" else 1e-36
    query = jnp.asarray(query, dtype)
    given |= {"query": query, "k_scale": np.float32(0.02), "v_scale": np.float32(0.01)}
    out, lse = compute(given)
    right, right_lse = expected(given)
    np.testing.assert_allclose(np.asarray(out, np.float64), right, rtol=1e-2, atol=4e-3)
    np.testing.assert_allclose(lse, right_lse, rtol=2e-5, atol=2e-5)


def test_every_configuration_of_8_bits() -> None:
    for options in ({}, {"sliding_window": (100, 0)}, {"split_size": 128}):
        given = narrow(call(Sizes((3, 1), (130, 300), 64, 2, 1, 128), **options), "float8_e4m3fn", 1)
        space = list(paged.config_space(on_card(given)))
        assert len({*space}) == len(space) > 4
        for cfg in space:
            compare(given, cfg)


# -- parts of a fixed size -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": (150, 0)}, {"softmax_aux": np.ones((4, 2))}],
    ids=["plain", "window", "sinks"],
)
@pytest.mark.parametrize("queries", [1, 5], ids="queries {}".format)
def test_a_sequence_has_the_same_bits_alone_and_among_others(queries: int, options: dict[str, Any]) -> None:
    """In one program or several, in parts of two blocks; the last part of a sequence is not full."""
    lengths = (300, 5, 129, 357, 6, 40, 520, 128, 64)
    sizes = Sizes(tuple(queries if place % 2 == 0 else 1 for place in range(9)), lengths, 16, dim=128)
    given = as_dtype(drawn(sizes, 3) | options, "bfloat16") | {"split_size": 128}
    out, lse = compute(given)
    right, _ = expected(given)
    np.testing.assert_allclose(out.astype(np.float64), right, atol=2e-2)
    heuristic = paged.heuristic_cfg(on_card(given))
    for place, splits, stages in ((0, 1, 1), (3, 2, 2), (4, 1, 3), (6, 2, 2)):
        cfg = attrs.evolve(heuristic, splits=splits, stages=stages)
        own_out, own_lse = compute(alone(given, place) | {"max_query_len": queries}, cfg)
        own = slice(*given["query_start_loc"][place : place + 2])
        assert own_out.tobytes() == out[own].tobytes()
        assert own_lse.tobytes() == np.ascontiguousarray(lse[:, own]).tobytes()


def test_the_size_of_parts_alone_decides_the_bits() -> None:
    """Tiles, blocks and warps are the same for all calls."""
    decided = set()
    for sequences, keys, queries in ((1, 64, 1), (64, 8192, 1), (2, 128, 300), (300, 4096, 4)):
        inv = on_card(shapes_of(sequences, keys, queries) | {"split_size": 256})
        space = list(paged.config_space(inv))
        assert len(space) > 3
        decided |= {(_tiling.tile(inv, cfg.programs), cfg.block, cfg.num_warps) for cfg in space}
    assert len(decided) == 1


def test_parts_in_every_configuration() -> None:
    """Of 128 keys, with a tile of 64 rows too."""
    for heads in ((2, 1), (33, 1)):
        given = call(Sizes((3, 1), (150, 400), 64, *heads), split_size=128)
        bits = set()
        for cfg in paged.config_space(on_card(given)):
            compare(given, cfg)
            bits.add(compute(given, cfg)[0].tobytes())
        assert len(bits) == 1


def test_one_program_has_all_parts_where_their_sums_would_be_too_large() -> None:
    inv = on_card(shapes_of(4, 65536, 2048) | {"split_size": 128})
    assert {cfg.splits for cfg in paged.config_space(inv)} == {1}
    with pytest.raises(Unsupported, match="sums of all parts are too large for more than 1 splits"):
        paged.check_cfg(inv, Config(2, 64, 3, 4, 2))


# -- shapes and refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "tile", "shape"),
    [
        (shapes_of(64, 8192, 1), (1, 16, 1), (1, 64, 3, 4, 2)),
        (shapes_of(1, 16384, 1), (1, 16, 1), (16, 64, 3, 4, 2)),
        (shapes_of(16, 4096, 4), (4, 16, 1), (1, 64, 3, 4, 2)),
        (shapes_of(4, 4096, 512), (16, 64, 2), (1, 128, 3, 4, 1)),
    ],
)
def test_shapes(monkeypatch: pytest.MonkeyPatch, given: Any, tile: tuple[int, ...], shape: tuple[int, ...]) -> None:
    monkeypatch.setattr(_tiling, "multiprocessors", lambda inv: 132)
    inv = on_card(given)
    cfg = paged.heuristic_cfg(inv)
    assert attrs.astuple(cfg) == shape
    assert attrs.astuple(_tiling.tile(inv, cfg.programs)) == tile


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (as_dtype(drawn(MIXED, 0), "float32"), "takes queries of float16 and bfloat16; not float32"),
        (call(MIXED), "takes pages of 8, 16, 32 or 64 tokens, or a multiple of 128; not 4"),
        (
            call(attrs.evolve(MIXED, page_size=24)),
            "takes pages of 8, 16, 32 or 64 tokens, or a multiple of 128; not 24",
        ),
        (
            call(Sizes((1,), (9,), 8), split_size=128, softmax_aux=np.ones((4, 3), np.float32)),
            "with split_size, the Gluon kernel takes up to 2 sinks of a head; not 3",
        ),
        (call(Sizes((1,), (9,), 8, 65, 1)), "takes up to 64 heads for a key head; not 65"),
        (call(Sizes((1,), (9,), 8, dim=20)), "takes multiples of 8 for head dims; not 20"),
        (
            narrow(call(Sizes((1,), (9,), 8, dim=24)), "int8"),
            "takes multiples of 16 for head dims for pages of 8 bits; not 24",
        ),
        (
            narrow(call(Sizes((1,), (9,), 8)), "float8_e4m3fn")
            | {"query": jnp.ones((1, 4, 64), jnp.float8_e4m3fn), "q_scale": np.float32(1)},
            "takes queries of float16 and bfloat16; not float8_e4m3fn",
        ),
    ],
)
def test_other_calls_are_refused_with_the_reason(given: dict[str, Any], reason: str) -> None:
    for hook in (paged.heuristic_cfg, paged.config_space):
        with pytest.raises(Unsupported, match=reason):
            hook(on_card(given))
