"""Random calls against a cache, compiled on a card, in values and gradients.

``EJKERNEL_RANDOM_CALLS=1000 pytest -m gpu plugins/triton/tests/test_random_calls_gpu.py`` runs a thousand of them.
"""

from __future__ import annotations

import os

import pytest

from ejkernel_ops.flash_attention.random_calls import check, random_call

pytestmark = pytest.mark.gpu

COUNT = int(os.environ.get("EJKERNEL_RANDOM_CALLS", "20"))
DTYPES = ("float32", "bfloat16", "float16")
#: What the decode kernel for Hopper does not take.
REFUSED = frozenset({"attention_mask", "bias", "q_segment_ids", "kv_segment_ids", "kv_positions"})


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_calls(seed: int) -> None:
    check(seed, backend="triton", dtype=DTYPES[seed % len(DTYPES)])


@pytest.mark.parametrize("seed", [seed for seed in range(COUNT) if random_call(seed)["query"].shape[1] <= 16])
def test_random_calls_of_few_queries_on_hopper(seed: int) -> None:
    """With NaN in unused slots, and the same bits twice."""
    options = {"backend": "gluon_decode_sm90", "without": REFUSED, "gradients": False}
    check(seed, dtype=DTYPES[1 + seed % 2], **options)
