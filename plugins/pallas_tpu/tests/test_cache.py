"""Attention against a cache, by values in float64: random calls, and calls of many blocks. Empty slots hold NaN."""

from __future__ import annotations

import os
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops.flash_attention.cached import in_any_order, with_lengths, with_ring
from ejkernel_ops.flash_attention.examples import qkv
from ejkernel_ops.flash_attention.random_calls import SAME_SHAPE, check, expected, filled
from ejkernel_pallas_tpu import flash_attention
from ejkernel_pallas_tpu.flash_attention import Config
from ejkernel_pallas_tpu.flash_attention import backward as flash_attention_bwd
from ejkernel_pallas_tpu.flash_attention.backward import Pass
from ejkernel_pallas_tpu.testing import interpreted_registry

#: ``EJKERNEL_RANDOM_CALLS=1000`` runs a thousand of them.
COUNT = int(os.environ.get("EJKERNEL_RANDOM_CALLS", "10"))
REGISTRY = interpreted_registry(
    {"flash_attention.pallas_tpu": flash_attention, "flash_attention_bwd.pallas_tpu": flash_attention_bwd}
)
#: With two passes, and with one.
FUSED = (None, Pass(128, 128))
WRT = ("query", "key", "value")


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_calls(seed):
    rng = random.Random(seed // SAME_SHAPE)
    q_block, k_block = rng.choices((128, 256), k=2)
    blocks = Pass(q_block, k_block)
    backward_cfg = flash_attention_bwd.Config(rng.choice((None, blocks)), blocks, blocks, blocks)
    check(seed, registry=REGISTRY, backend="pallas_tpu", cfg=Config(q_block, k_block), backward_cfg=backward_cfg)


CALLS = {
    "lengths": with_lengths(qkv(0, 3, 200, 500, 2, 2, 16), [300, 0, 129]) | {"causal": True},
    "start and lengths": with_lengths(qkv(1, 2, 150, 500, 2, 1, 16), [256, 400])
    | {"q_start": np.array([-70, 140], np.int32), "causal": True, "sliding_window": (150, 0)},
    "start": qkv(2, 2, 200, 500, 2, 1, 16) | {"q_start": np.array([450, 20], np.int32), "sliding_window": (90, 30)},
    "ring": with_ring(qkv(3, 2, 140, 500, 2, 2, 16), [1300, 310]) | {"causal": True, "sliding_window": (200, 0)},
    "any order": in_any_order(qkv(4, 2, 200, 500, 2, 1, 16), 4) | {"causal": True},
    "one query": with_lengths(qkv(5, 3, 1, 500, 4, 4, 16), [257, 1, 500]) | {"sliding_window": (300, 0)},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_many_blocks(name, dtype):
    call = {"sliding_window": None, "logits_soft_cap": None, "causal": False} | CALLS[name]
    call |= {array: jnp.asarray(call[array], dtype) for array in WRT}
    forward = {"backend": "pallas_tpu", "cfg": Config(128, 128), "return_lse": True}
    out, lse = REGISTRY.call("flash_attention", **call, **forward)
    d_out, d_lse = (normal(seed, x) for seed, x in ((6, out), (7, lse)))
    results = expected(call, d_out, d_lse)
    compare({"out": out, "lse": lse}, results)
    for fused in FUSED:
        saved = {"out": out, "lse": lse, "d_out": d_out, "d_lse": d_lse, "wrt": WRT}
        cfg = flash_attention_bwd.Config(fused, Pass(128, 128), Pass(128, 128))
        arrays = REGISTRY.call("flash_attention_bwd", **call, **saved, backend="pallas_tpu", cfg=cfg)
        gradients = dict(zip(WRT, arrays, strict=True))
        compare(gradients, results)
        for array in ("key", "value"):
            assert not np.asarray(gradients[array])[~filled(call)].any()


def normal(seed, like):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(like.shape), like.dtype)


def compare(actual, results):
    for name, array in actual.items():
        tolerance = {"float32": 3e-5, "bfloat16": 5e-2}[str(actual["out" if "out" in actual else "key"].dtype)]
        scale = np.abs(results[name][np.isfinite(results[name])]).max(initial=1)
        values = np.asarray(array, np.float64)
        np.testing.assert_allclose(values, results[name], rtol=tolerance, atol=tolerance * scale, err_msg=name)


def test_a_length_beyond_the_slots_lets_no_padding_in():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 130, 2, 16))
    out, longer = (
        REGISTRY.call("flash_attention", query, key, value, q_start=0, kv_lengths=length, backend="pallas_tpu")
        for length in (130, 200)
    )
    assert (out == longer).all()
