"""Random calls against a cache, in values and gradients.

``EJKERNEL_RANDOM_CALLS=1000 pytest plugins/xla/tests/test_random_calls.py`` runs a thousand of them.
"""

from __future__ import annotations

import os
import random

import pytest

from ejkernel_ops.flash_attention.random_calls import SAME_SHAPE, check
from ejkernel_xla.flash_attention import Config, backward

COUNT = int(os.environ.get("EJKERNEL_RANDOM_CALLS", "10"))
#: So small that there are several blocks, and some that nothing sees.
BLOCKS = (4, 8, 16, 32, 128)


@pytest.mark.parametrize("seed", range(0, 1000, max(1, 1000 // COUNT)))  # few of them, of many shapes
def test_random_calls(seed: int) -> None:
    sizes = random.Random(seed // SAME_SHAPE).choices(BLOCKS, k=4)
    check(seed, backend="xla", cfg=Config(*sizes[:2]), backward_cfg=backward.Config(*sizes[2:]))
