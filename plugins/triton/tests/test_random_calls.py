"""Random calls against a cache, in values and gradients, with NaN in every slot that holds no key: in the interpreter.

``EJKERNEL_RANDOM_CALLS=100 pytest plugins/triton/tests/test_random_calls.py`` runs a hundred of them.
"""

from __future__ import annotations

import os
import random

import pytest

from ejkernel_ops.flash_attention.random_calls import SAME_SHAPE, check
from ejkernel_triton import flash_attention
from ejkernel_triton.flash_attention import Config, backward
from ejkernel_triton.flash_attention.backward import Pass
from ejkernel_triton.interpreter import interpreted, interpreted_registry

COUNT = int(os.environ.get("EJKERNEL_RANDOM_CALLS", "10"))
#: So small that there are several blocks, and some that nothing sees.
BLOCKS = (16, 32)
KERNELS = {"flash_attention.triton": flash_attention, "flash_attention_bwd.triton": backward}


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_calls(seed: int) -> None:
    rng = random.Random(seed // SAME_SHAPE)
    forward, *passes = (tuple(rng.choices(BLOCKS, k=2)) for _ in range(4))
    backward_cfg = backward.Config(*(Pass(*blocks, 4, 1) for blocks in passes), atomics=rng.random() < 0.2)
    with interpreted():
        check(
            seed,
            registry=interpreted_registry(KERNELS),
            backend="triton",
            cfg=Config(*forward, 4, 1),
            backward_cfg=backward_cfg,
        )
