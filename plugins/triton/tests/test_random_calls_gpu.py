"""Random calls against a cache, and over its pages, compiled on a card: values, and gradients where there are any.

``EJKERNEL_RANDOM_CALLS=1000 pytest -m gpu plugins/triton/tests/test_random_calls_gpu.py`` runs a thousand of them, and
``1000-2000`` the next thousand.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

import ejkernel_core
from ejkernel_ops.flash_attention.random_calls import check, random_call
from ejkernel_ops.ragged_paged_attention.examples import Sizes, drawn
from ejkernel_ops.ragged_paged_attention.random_calls import as_dtype
from ejkernel_ops.ragged_paged_attention.random_calls import check as check_over_pages
from plugins.triton.tests.hopper_cache_calls import CALLS
from plugins.triton.tests.hopper_cache_calls import check as check_several_blocks
from plugins.triton.tests.paged_calls import alone

pytestmark = pytest.mark.gpu

_FIRST, _, _END = os.environ.get("EJKERNEL_RANDOM_CALLS", "20").rpartition("-")
SEEDS = range(int(_FIRST or 0), int(_END))
DTYPES = ("float32", "bfloat16", "float16")
#: What the kernels for Hopper do not take.
REFUSED_BY_GLUON = frozenset({"attention_mask", "bias", "other value_dim"})
REFUSED_BY_GLUON_DECODE = frozenset({"attention_mask", "bias", "q_segment_ids", "kv_segment_ids", "kv_positions"})
REFUSED_BY_GLUON_OVER_PAGES = frozenset({"fp8_query"})
#: Those that the copy engine fetches.
PAGE_SIZES = (8, 16, 32, 64, 128, 256, 1024)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls(seed: int) -> None:
    check(seed, backend="triton", dtype=DTYPES[seed % len(DTYPES)])


@pytest.mark.parametrize("seed", [seed for seed in SEEDS if random_call(seed)["query"].shape[1] <= 16])
def test_random_calls_of_few_queries_on_hopper(seed: int) -> None:
    """With NaN in unused slots, and the same bits twice."""
    options = {"backend": "gluon_decode_sm90", "without": REFUSED_BY_GLUON_DECODE, "gradients": False}
    check(seed, dtype=DTYPES[1 + seed % 2], **options)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls_on_hopper(seed: int) -> None:
    check(seed, backend="gluon_sm90", dtype=DTYPES[1 + seed % 2], without=REFUSED_BY_GLUON)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", CALLS)
def test_several_blocks_on_hopper(name: str, dim: int) -> None:
    check_several_blocks(name, dim, ejkernel_core.registry)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls_over_pages(seed: int) -> None:
    """Of up to 4,097 keys, with NaN in unused rows and pages, and the same bits twice."""
    check_over_pages(seed, backend="triton", dtype=DTYPES[seed % len(DTYPES)])


@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls_over_pages_on_hopper(seed: int) -> None:
    """Of 16 and of 8 bits."""
    options = {"backend": "gluon_sm90", "without": REFUSED_BY_GLUON_OVER_PAGES, "page_sizes": PAGE_SIZES}
    check_over_pages(seed, dtype=DTYPES[1 + seed % 2], **options)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("backend", ["triton", "gluon_sm90"])
def test_a_sequence_has_the_same_bits_alone_and_among_255_others(backend: str, queries: int) -> None:
    lengths = np.random.default_rng(0).integers(queries, 3000, 256)
    given = as_dtype(drawn(Sizes((queries,) * 256, tuple(map(int, lengths)), 16, 8, 2, 128), 3), "bfloat16")
    options = {"split_size": 256, "return_lse": True, "backend": backend}
    out, lse = ejkernel_core.call("ragged_paged_attention", **given, **options)
    for place in range(0, 256, 17):
        own_out, own_lse = ejkernel_core.call("ragged_paged_attention", **alone(given, place), **options)
        own = slice(queries * place, queries * (place + 1))
        assert np.asarray(own_out).tobytes() == np.asarray(out[own]).tobytes()
        assert np.asarray(own_lse).tobytes() == np.ascontiguousarray(np.asarray(lse[:, own])).tobytes()
