"""Sampled inputs are valid, and costs are those counted by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import registry
from ejkernel_ops.flash_attention.cost import pairs

F32 = jnp.float32


def abstract(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def invocation(op: str = "flash_attention", **arguments: Any) -> dict[str, Any]:
    arrays = {"query": abstract(2, 6, 4, 8), "key": abstract(2, 9, 2, 8), "value": abstract(2, 9, 2, 5), **arguments}
    return dict(registry.plan(op, **arrays).invocation)


def test_samples_are_valid_and_independent() -> None:
    arguments = invocation(
        attention_mask=abstract(2, 1, 6, 9, dtype=jnp.bool_),
        q_segment_ids=abstract(2, 6, dtype=jnp.int32),
        kv_segment_ids=abstract(2, 9, dtype=jnp.int32),
        bias=abstract(4, 6, 9, dtype=jnp.bfloat16),
        dropout_prob=0.5,
        dropout_seed=abstract(dtype=jnp.int32),
        causal=True,
    )
    operation = registry.operation("flash_attention")
    assert operation.samples is not None
    samples = operation.samples(arguments, jax.random.key(0))
    for name, like in arguments.items():
        if isinstance(like, jax.ShapeDtypeStruct):
            assert (samples[name].shape, samples[name].dtype) == (like.shape, like.dtype), name
        else:
            assert samples[name] is like
    assert 0.5 < np.mean(samples["attention_mask"]) < 1
    assert set(np.unique(samples["kv_segment_ids"])) == {1, 2, 3, 4}
    assert (np.diff(samples["q_segment_ids"]) >= 0).all()
    assert abs(float(samples["query"].std()) - 1) < 0.1
    assert not np.allclose(samples["key"].ravel()[:50], samples["query"].ravel()[:50])
    again = operation.samples(arguments, jax.random.key(0))
    np.testing.assert_array_equal(again["key"], samples["key"])


@pytest.mark.parametrize(("total_q", "total_k", "count"), [(10, 13, 3), (2, 1, 4), (8, 8, 1)])
def test_sampled_boundaries_are_valid(total_q: int, total_k: int, count: int) -> None:
    arguments = invocation(
        query=abstract(total_q, 4, 8),
        key=abstract(total_k, 2, 8),
        value=abstract(total_k, 2, 8),
        cum_seqlens_q=abstract(count + 1, dtype=jnp.int32),
        cum_seqlens_k=abstract(count + 1, dtype=jnp.int32),
    )
    operation = registry.operation("flash_attention")
    assert operation.samples is not None
    samples = operation.samples(arguments, jax.random.key(0))
    for name, total in (("cum_seqlens_q", total_q), ("cum_seqlens_k", total_k)):
        bounds = np.asarray(samples[name])
        assert bounds[0] == 0
        assert bounds[-1] == total
        assert (np.diff(bounds) >= 0).all()


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"sliding_window": (2, 1)}, {"causal": True, "sliding_window": 3}]
)
@pytest.mark.parametrize(("q_length", "k_length"), [(6, 9), (9, 6), (7, 7), (1, 4)])
def test_visible_pairs(options: dict[str, Any], q_length: int, k_length: int) -> None:
    arguments = invocation(
        query=abstract(2, q_length, 4, 8), key=abstract(2, k_length, 2, 8), value=abstract(2, k_length, 2, 5), **options
    )
    window = options.get("sliding_window", 99)
    left, right = window if isinstance(window, tuple) else (window, window)
    if options.get("causal"):
        right = 0
    offset = k_length - q_length
    counted = sum(-left <= j - (i + offset) <= right for i in range(q_length) for j in range(k_length))
    assert pairs(arguments) == 2 * counted


def test_costs_of_both_passes() -> None:
    arguments = invocation()
    cost = registry.operation("flash_attention").cost
    assert cost is not None
    cost_of_pass = cost(arguments)
    q, k, v, out, lse = 2 * 6 * 4 * 8, 2 * 9 * 2 * 8, 2 * 9 * 2 * 5, 2 * 6 * 4 * 5, 2 * 4 * 6
    assert cost_of_pass.flops == 2 * 2 * 6 * 9 * 4 * (8 + 5)
    assert cost_of_pass.bytes == 4 * (q + k + v + out + lse)
    backward = registry.operation("flash_attention_bwd").cost
    assert backward is not None
    saved = {"out": abstract(2, 6, 4, 5), "lse": abstract(2, 4, 6), "d_out": abstract(2, 6, 4, 5)}
    cost_of_pass = backward({**arguments, **saved, "d_lse": None, "wrt": ("query", "value")})
    assert cost_of_pass.flops == 2 * 2 * 6 * 9 * 4 * (3 * 8 + 2 * 5)
    assert cost_of_pass.bytes == 4 * (q + k + v + out + lse + out + q + v)


def test_sampled_lengths_are_from_half_of_the_slots_and_positions_are_those_of_a_ring() -> None:
    operation = registry.operation("flash_attention")
    assert operation.samples is not None
    shapes = {"query": abstract(40, 3, 4, 8), "key": abstract(40, 9, 2, 8), "value": abstract(40, 9, 2, 5)}
    lengths, positions = abstract(40, dtype=jnp.int32), abstract(40, 9, dtype=jnp.int32)
    cached = operation.samples(invocation(**shapes, kv_lengths=lengths), jax.random.key(0))
    assert {*np.unique(cached["kv_lengths"])} == {5, 6, 7, 8, 9}
    np.testing.assert_array_equal(cached["q_start"], cached["kv_lengths"] - 3)
    started = operation.samples(invocation(**shapes, q_start=lengths), jax.random.key(0))
    np.testing.assert_array_equal(started["q_start"], np.full(40, 6))
    ring = operation.samples(invocation(**shapes, q_start=lengths, kv_positions=positions), jax.random.key(0))
    for row, start in zip(np.asarray(ring["kv_positions"]), np.asarray(ring["q_start"]), strict=True):
        assert sorted(row) == list(range(start + 3 - 9, start + 3))  # the last query is at the last key
        assert (row % 9 == np.arange(9)).all()


@pytest.mark.parametrize("operation", ["flash_attention", "flash_attention_bwd"])
def test_a_cache_costs_as_much_as_the_keys_of_its_samples(operation: str) -> None:
    saved: dict[str, Any] = {}
    if operation == "flash_attention_bwd":
        saved = {
            "out": abstract(2, 6, 4, 5),
            "lse": abstract(2, 4, 6),
            "d_out": abstract(2, 6, 4, 5),
            "wrt": ("query",),
        }
    keys = {"key": abstract(2, 12, 2, 8), "value": abstract(2, 12, 2, 5)}
    plain = invocation(operation, causal=True, **saved)  # of nine keys, three quarters of twelve
    cached = invocation(operation, causal=True, **saved, **keys, kv_lengths=abstract(2, dtype=jnp.int32))
    cost = registry.operation(operation).cost
    assert cost is not None
    assert cost(cached).flops == cost(plain).flops
    assert cost(cached).bytes == cost(plain).bytes + 2 * 2 * 4  # and the lengths and starts of two rows
    started = invocation(operation, causal=True, **saved, q_start=abstract(2, dtype=jnp.int32))
    assert (cost(started).flops, cost(started).bytes) == (cost(plain).flops, cost(plain).bytes + 2 * 4)
