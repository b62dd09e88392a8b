"""Random calls against a cache, over its pages, of the loss, of log-probabilities and of sampling, compiled on a card:
values, and gradients where there are any.

``EJKERNEL_RANDOM_CALLS=1000 pytest -m gpu plugins/triton/tests/test_random_calls_gpu.py`` runs a thousand of them, and
``1000-2000`` the next thousand.
"""

from __future__ import annotations

import os

import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_ops.flash_attention.random_calls import check, random_call
from ejkernel_ops.fused_linear_cross_entropy.random_calls import check as check_loss
from ejkernel_ops.fused_linear_cross_entropy.random_calls import random_call as random_loss
from ejkernel_ops.linear_log_probs.random_calls import check as check_log_probs
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


@pytest.mark.parametrize("backend", ["triton", "xla"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls_of_the_loss(seed: int, backend: str) -> None:
    """With all gradients."""
    check_loss(seed, dtype=DTYPES[seed % len(DTYPES)], backend=backend)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls_of_the_loss_on_hopper(seed: int) -> None:
    """Of several tiles for each program, with all gradients."""
    sizes = {"dims": (8, 136, 1024), "vocabularies": (8, 264, 1000, 128_256)}
    if random_loss(seed, "bfloat16", sizes["vocabularies"], sizes["dims"]).arguments["labels"].size:
        check_loss(seed, dtype=DTYPES[1 + seed % 2], backend="gluon_sm90", **sizes)


@pytest.mark.parametrize("backend", ["triton", "xla"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls_of_log_probs(seed: int, backend: str) -> None:
    """With all gradients."""
    check_log_probs(seed, DTYPES[seed % len(DTYPES)], backend=backend)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls_of_log_probs_on_hopper(seed: int) -> None:
    sizes = {"shapes": ((1,), (37,), (2, 300)), "dims": (8, 136, 2048), "vocabularies": (8, 264, 1000, 128_256)}
    check_log_probs(seed, DTYPES[1 + seed % 2], backend="gluon_sm90", **sizes)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls_of_sampling(seed: int) -> None:
    """Of large vocabularies: the tokens of the reference, but for sums that are rounded near a limit."""
    rng = np.random.default_rng([seed, 51])
    rows, words = int(rng.integers(1, 70)), int(rng.choice([1000, 32_000, 50_257, 128_256, 300_001]))
    choices = {
        "temperature": [0, 0.6, 1, 2],
        "top_k": [0, 1, 50, 2000],
        "top_p": [0.3, 0.9, 0.999, 1],
        "min_p": [0, 0.1],
    }
    numbers = {name: rng.choice(values, rows) for name, values in choices.items() if rng.random() < 0.6}
    logits = (rng.choice([0.3, 1, 4]) * rng.normal(size=(rows, words))).astype(np.float32)
    given = {"logits": jnp.asarray(logits, DTYPES[seed % len(DTYPES)]), **numbers, "return_logprobs": True}
    given["key"] = jnp.asarray(rng.integers(0, 2**32, (rows, 2), dtype=np.uint32))
    tokens, logprobs = ejkernel_core.call("sample_tokens", **given, backend="triton")
    expected, expected_logprobs = ejkernel_core.call("sample_tokens", **given, backend="reference")
    is_same = np.asarray(tokens == expected)
    assert (~is_same).sum() <= (1 if "top_p" in numbers else 0), (tokens, expected)
    np.testing.assert_allclose(logprobs[is_same], expected_logprobs[is_same], rtol=2e-6, atol=1e-5)
