"""Random calls against a cache, compiled on a card, in values and gradients.

``EJKERNEL_RANDOM_CALLS=1000 pytest -m gpu plugins/triton/tests/test_random_calls_gpu.py`` runs a thousand of them.
"""

from __future__ import annotations

import os

import pytest

from ejkernel_ops.flash_attention.random_calls import check

pytestmark = pytest.mark.gpu

COUNT = int(os.environ.get("EJKERNEL_RANDOM_CALLS", "20"))
DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_calls(seed: int) -> None:
    check(seed, backend="triton", dtype=DTYPES[seed % len(DTYPES)])
