"""Attention against a cache by the kernels for Hopper, in the interpreter, in values and gradients.

Every slot that holds no key is NaN. ``EJKERNEL_RANDOM_CALLS=100`` runs a hundred random calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_ops.flash_attention.random_calls import SAME_SHAPE
from ejkernel_ops.flash_attention.random_calls import check as check_random_call
from ejkernel_triton import flash_attention_decode, flash_attention_decode_sm90
from ejkernel_triton import flash_attention_sm90 as flash_attention
from ejkernel_triton.flash_attention_decode_sm90 import _launch
from ejkernel_triton.flash_attention_sm90 import backward as flash_attention_bwd
from ejkernel_triton.gluon import requirements
from ejkernel_triton.interpreter import interpreted, interpreted_registry
from ejkernel_triton.launch import _jax_triton
from plugins.triton.tests.hopper_cache_calls import CALLS, check

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

COUNT = int(os.environ.get("EJKERNEL_RANDOM_CALLS", "5"))
REFUSED = frozenset({"bias", "attention_mask", "other value_dim"})
KERNELS: dict[str, Any] = {
    "flash_attention.gluon_sm90": flash_attention,
    "flash_attention_bwd.gluon_sm90": flash_attention_bwd,
}
ALL_KERNELS = KERNELS | {
    "flash_attention.gluon_decode_sm90": flash_attention_decode_sm90,
    "flash_attention.triton_decode": flash_attention_decode,
}


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, interpreted():
        patch.setattr(requirements, "_unavailable_reason", lambda: None)
        for module in (flash_attention, flash_attention_bwd):
            patch.setattr(module, "multiprocessors", lambda inv: 2)
        patch.setattr(_launch, "multiprocessors", lambda inv: 3)
        yield


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_calls(seed: int) -> None:
    dtype = ("bfloat16", "float16")[seed // SAME_SHAPE % 2]
    check_random_call(seed, registry=interpreted_registry(KERNELS), backend="gluon_sm90", dtype=dtype, without=REFUSED)


@pytest.mark.parametrize("decoding", ["gluon_decode_sm90", "triton_decode"])
def test_a_prompt_and_steps_in_one_program(decoding: str) -> None:
    """Two kernels in one program, the second one in a scan, with the cache as carry and NaN in empty slots."""
    registry, lengths, steps = interpreted_registry(ALL_KERNELS), jnp.array([150, 37]), 5
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(2, 160, heads, 64) for heads in (4, 2, 2)]
    query, key, value = (jax.random.normal(k, shape, "float16") for k, shape in zip(keys, shapes, strict=True))
    rows, index = jnp.arange(2), jnp.arange(160)[None, :, None, None]

    def step(carry: Any, i: Any) -> Any:
        caches, length = carry
        new = (array[rows, length] for array in (key, value))
        caches = tuple(cache.at[rows, length].set(x) for cache, x in zip(caches, new, strict=True))
        out = registry.call(
            "flash_attention",
            query[rows, length][:, None],
            *caches,
            causal=True,
            kv_lengths=length + 1,
            backend=decoding,
        )
        return (caches, length + 1), out[:, 0]

    @jax.jit
    def program(lengths: jax.Array) -> Any:
        caches = tuple(jnp.where(index < lengths[:, None, None, None], array, jnp.nan) for array in (key, value))
        options = {"q_start": 0, "kv_lengths": lengths, "causal": True, "backend": "gluon_sm90"}
        prompt = registry.call("flash_attention", query[:, :150], *caches, **options)
        _, outs = jax.lax.scan(step, (caches, lengths), jnp.arange(steps))
        return prompt, outs

    prompt, outs = program(lengths)
    wide = (np.asarray(array, np.float32) for array in (query, key, value))
    expected = np.asarray(ejkernel_core.call("flash_attention", *wide, causal=True, backend="reference"))
    for row, length in enumerate([150, 37]):
        np.testing.assert_allclose(prompt[row, :length], expected[row, :length], atol=3e-3)
        np.testing.assert_allclose(outs[:, row], expected[row, length : length + steps], atol=3e-3)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_with_nan_in_empty_slots(name: str, dim: int) -> None:
    """Programs have several tiles."""
    check(name, dim, interpreted_registry(KERNELS))
