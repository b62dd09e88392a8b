"""Attention against a cache by the kernels for Hopper, in the interpreter, in values and gradients.

Every slot that holds no key is NaN. ``EJKERNEL_RANDOM_CALLS=100`` runs a hundred random calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ejkernel_ops.flash_attention.random_calls import SAME_SHAPE
from ejkernel_ops.flash_attention.random_calls import check as check_random_call
from ejkernel_triton import flash_attention_sm90 as flash_attention
from ejkernel_triton.flash_attention_sm90 import _schedule
from ejkernel_triton.flash_attention_sm90 import backward as flash_attention_bwd
from ejkernel_triton.hopper import requirements
from ejkernel_triton.interpreter import interpreted, interpreted_registry
from ejkernel_triton.launch import _jax_triton
from plugins.triton.tests.hopper_cache_calls import CALLS, check

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

COUNT = int(os.environ.get("EJKERNEL_RANDOM_CALLS", "5"))
REFUSED = frozenset({"bias", "attention_mask", "other value_dim"})
KERNELS = {"flash_attention.gluon_sm90": flash_attention, "flash_attention_bwd.gluon_sm90": flash_attention_bwd}


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, interpreted():
        patch.setattr(requirements, "_unavailable_reason", lambda: None)
        patch.setattr(_schedule, "programs", lambda device_kind: 2)
        yield


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_calls(seed: int) -> None:
    dtype = ("bfloat16", "float16")[seed // SAME_SHAPE % 2]
    check_random_call(seed, registry=interpreted_registry(KERNELS), backend="gluon_sm90", dtype=dtype, without=REFUSED)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_with_nan_in_empty_slots(name: str, dim: int) -> None:
    """Programs have several tiles."""
    check(name, dim, interpreted_registry(KERNELS))
