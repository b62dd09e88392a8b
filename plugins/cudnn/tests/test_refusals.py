"""Calls that cuDNN would compute differently from the operation, and machines without it."""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_core import NoKernel, registry
from ejkernel_cudnn.flash_attention import library
from ejkernel_triton.launch import _jax_triton


def invocation(dtype: Any = jnp.bfloat16, op: str = "flash_attention", **arguments: Any) -> Any:
    arrays = {name: jax.ShapeDtypeStruct((2, 64, 4, 16), dtype) for name in ("query", "key", "value")}
    return registry.plan(op, **{**arrays, **arguments}).invocation


INT = jnp.int32
REFUSED = {
    "a bias": {"bias": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)},
    "an attention mask": {"attention_mask": jax.ShapeDtypeStruct((64, 64), jnp.bool_)},
    "segment ids": {name: jax.ShapeDtypeStruct((2, 64), INT) for name in ("q_segment_ids", "kv_segment_ids")},
    "sink logits": {"softmax_aux": jax.ShapeDtypeStruct((4,), jnp.bfloat16)},
    "a position of the queries": {"q_start": jax.ShapeDtypeStruct((), INT)},
    "lengths of a cache": {"kv_lengths": jax.ShapeDtypeStruct((2,), INT)},
    "positions of keys": {"q_start": jax.ShapeDtypeStruct((), INT), "kv_positions": jax.ShapeDtypeStruct((2, 64), INT)},
    "a soft cap": {"logits_soft_cap": 3.0},
    "dropout": {"dropout_prob": 0.5, "dropout_seed": jax.ShapeDtypeStruct((), INT)},
    "not float32": {"dtype": jnp.float32},
    "no right side": {"sliding_window": (8, 8)},
    "one head dim": {"value": jax.ShapeDtypeStruct((2, 64, 4, 8), jnp.bfloat16)},
    "multiples of 8": {n: jax.ShapeDtypeStruct((2, 64, 4, 12), jnp.bfloat16) for n in ("query", "key", "value")},
    "aligned differently": {
        "causal": True,
        **{name: jax.ShapeDtypeStruct((2, 99, 4, 16), jnp.bfloat16) for name in ("key", "value")},
    },
    "no single query with a single key": {
        name: jax.ShapeDtypeStruct((2, 1, 4, 16), jnp.bfloat16) for name in ("query", "key", "value")
    },
    "a positive softmax_scale": {"softmax_scale": -1.0},
    "packed sequences": {
        **{name: jax.ShapeDtypeStruct((64, 4, 16), jnp.bfloat16) for name in ("query", "key", "value")},
        **{name: jax.ShapeDtypeStruct((3,), INT) for name in ("cum_seqlens_q", "cum_seqlens_k")},
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_cudnn_refuses_what_it_would_not_do_exactly(reason: str) -> None:
    assert reason in str(library.refusal(invocation(**REFUSED[reason])))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "sliding_window": (8, 0)}])
def test_without_a_gpu_other_calls_are_refused_for_that_alone(options: dict[str, Any]) -> None:
    if jax.default_backend() != "gpu":
        assert "GPU" in str(library.refusal(invocation(**options)))


def test_cudnns_backward_takes_no_gradient_of_the_log_sum_exp() -> None:
    bfloat16, lse = jax.ShapeDtypeStruct((2, 64, 4, 16), jnp.bfloat16), jax.ShapeDtypeStruct((2, 4, 64), jnp.float32)
    saved = {"out": bfloat16, "lse": lse, "d_out": bfloat16, "d_lse": lse, "wrt": ("query",)}
    assert "no gradient of the log-sum-exp" in str(library.refusal(invocation(op="flash_attention_bwd", **saved)))


def test_an_explicit_cudnn_is_refused_with_the_reason() -> None:
    if jax.default_backend() != "gpu":
        query = jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, 2, 16)), jnp.bfloat16)
        with pytest.raises(NoKernel, match="flash_attention.cudnn .*: refused, it runs on gpu; this is cpu"):
            ejkernel_core.call("flash_attention", query, query, query, backend="cudnn")


@pytest.mark.parametrize("queries", [1, 2])
def test_the_last_query_alone_sees_all_keys(queries: int) -> None:
    """With causality a single query sees all keys. The first of two does not, and cuDNN would align them differently."""
    arrays = {
        "query": jax.ShapeDtypeStruct((2, queries, 8, 64), jnp.bfloat16),
        **{name: jax.ShapeDtypeStruct((2, 99, 2, 64), jnp.bfloat16) for name in ("key", "value")},
    }
    reason = library._unsupported_mask(invocation(**arrays, causal=True))
    assert (reason is None) == (queries == 1)


@pytest.mark.parametrize(("queries", "backends"), [(1, ["cudnn", "triton_decode"]), (2, ["triton_decode", "triton"])])
def test_one_query_goes_to_cudnn_first(queries: int, backends: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "refusal", lambda arguments: None)
    monkeypatch.setattr(_jax_triton, "unavailable_reason", lambda: None)
    arrays = {
        "query": jax.ShapeDtypeStruct((64, queries, 32, 128), jnp.bfloat16),
        **{name: jax.ShapeDtypeStruct((64, 8192, 8, 128), jnp.bfloat16) for name in ("key", "value")},
    }
    card = {"platform": "gpu", "device_kind": "NVIDIA A100-SXM4-80GB", "compute_capability": (8, 0)}
    inv = attrs.evolve(invocation(**arrays), **card)
    candidates, _ = registry.candidates(inv)
    assert [candidate.backend for candidate in candidates][:2] == backends
