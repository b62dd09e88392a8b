"""Attention against a cache by the portable kernels, in the interpreter: what they read, and calls at the limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ejkernel_core import Registry
from ejkernel_ops.flash_attention.random_calls import expected
from ejkernel_triton import flash_attention
from ejkernel_triton.flash_attention import Config, backward
from ejkernel_triton.flash_attention.backward import Pass
from ejkernel_triton.interpreter import interpreted, interpreted_registry

SLOTS, BLOCK = 96, 16
KERNELS = {"flash_attention.triton": flash_attention, "flash_attention_bwd.triton": backward}
FAR = 2**29 - 200


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    with interpreted():
        yield interpreted_registry(KERNELS)


def call_of(queries: int, **arguments: Any) -> dict[str, Any]:
    rng = np.random.default_rng([7, queries])
    options = {"causal": False, "sliding_window": None, "logits_soft_cap": None, "return_lse": True}
    return {
        "query": rng.standard_normal((2, queries, 4, 16), np.float32),
        "key": rng.standard_normal((2, SLOTS, 2, 16), np.float32),
        "value": rng.standard_normal((2, SLOTS, 2, 16), np.float32),
        **options,
        **arguments,
    }


def results_of(registry: Registry, call: dict[str, Any], atomics: bool = False) -> tuple[Any, Any]:
    """The results and gradients of the kernels, and the cotangents."""
    out, lse = registry.call("flash_attention", **call, backend="triton", cfg=Config(BLOCK, BLOCK, 4, 1))
    rng, wrt = np.random.default_rng(8), tuple(n for n in ("query", "key", "value", "bias") if n in call)
    cotangents = {"d_out": rng.standard_normal(out.shape, np.float32), "d_lse": None}
    cfg = backward.Config(*(Pass(BLOCK, BLOCK, 4, 1),) * 3, atomics=atomics)
    saved = {"out": out, "lse": lse, "wrt": wrt, **cotangents}
    gradients = registry.call("flash_attention_bwd", **call, **saved, backend="triton", cfg=cfg)
    actual = {"out": out, "lse": lse} | dict(zip(wrt, gradients, strict=True))
    return {name: np.asarray(x) for name, x in actual.items()}, cotangents


def ring(ends: list[int]) -> Any:
    last = np.asarray(ends)[:, None] - 1
    positions = last - (last - np.arange(SLOTS)) % SLOTS
    return np.where(positions < 0, -1, positions).astype(np.int32)


CALLS: dict[str, dict[str, Any]] = {
    "no-keys": {"kv_lengths": np.array([0, 40], np.int32), "causal": True},
    "before-all-keys": {"q_start": np.array([-60, -2], np.int32), "causal": True},
    "behind-all-keys": {"q_start": np.array([300, 100], np.int32), "sliding_window": (10, 0)},
    "window-behind-the-length": {"q_start": 60, "kv_lengths": np.array([33, 64], np.int32), "sliding_window": (20, 5)},
    "ring-in-two-runs": {
        "kv_positions": ring([140, 290]),
        "q_start": np.array([130, 286], np.int32),
        "sliding_window": (25, 0),
    },
    "far-ring": {
        "kv_positions": ring([FAR + 140, FAR]),
        "q_start": np.array([FAR + 130, FAR - 20], np.int32),
        "causal": True,
        "sliding_window": (2**31, 2**31),
    },
    "far-before-a-ring": {
        "kv_positions": ring([2**29, FAR + 140]),
        "q_start": np.array([-(2**29), FAR], np.int32),
        "sliding_window": (2**30, 2**30),
    },
    "empty-ring": {"kv_positions": np.full((2, SLOTS), -1, np.int32), "q_start": 4, "causal": True},
    "bias": {"q_start": 50, "kv_lengths": np.array([70, 30], np.int32), "causal": True, "bias": None},
    "bias-and-ring": {"q_start": 90, "kv_positions": ring([110, 60]), "causal": True, "bias": None},
}


@pytest.mark.parametrize("atomics", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_with_nan_in_empty_slots(registry: Registry, name: str, atomics: bool) -> None:
    """A query that sees nothing has an output of 0 and an lse of -inf, and empty slots have gradients of 0."""
    call = call_of(33, **CALLS[name])
    if "bias" in call:
        call["bias"] = np.random.default_rng(9).standard_normal((1, 4, 33, SLOTS), np.float32)
    if call.get("kv_positions") is not None:
        empty = call["kv_positions"] < 0
    else:
        lengths = np.broadcast_to(call.get("kv_lengths", SLOTS), 2)
        empty = np.arange(SLOTS)[None] >= lengths[:, None]
    call["key"][empty], call["value"][empty] = np.nan, np.nan
    actual, cotangents = results_of(registry, call, atomics)
    if "bias" in call:  # `expected` takes one of full shape, whose gradient is not summed over the batch
        results = expected(call | {"bias": np.broadcast_to(call["bias"], (2, 4, 33, SLOTS))}, **cotangents)
        results["bias"] = results["bias"].sum(0, keepdims=True)
    else:
        results = expected(call, **cotangents)
    for part, array in actual.items():
        np.testing.assert_allclose(array, results[part], rtol=3e-5, atol=3e-5, err_msg=part)
    for part in ("key", "value"):
        assert (actual[part][empty] == 0).all()


@pytest.mark.parametrize("name", ["window-behind-the-length", "ring-in-two-runs"])
def test_unseen_blocks_are_not_read(registry: Registry, name: str) -> None:
    """NaN in every block that no query sees, although its slots hold keys: only keys in blocks that are read count."""
    call = call_of(4, **CALLS[name])
    window = call["sliding_window"]
    for b in range(2):
        first = int(np.broadcast_to(call["q_start"], 2)[b])
        places = call["kv_positions"][b] if call.get("kv_positions") is not None else np.arange(SLOTS)
        is_seen = (places >= first - window[0]) & (places <= first + 3 + window[1])
        blocks = is_seen.reshape(-1, BLOCK).any(1).repeat(BLOCK)
        assert not blocks.all(), "the example has no block to skip"
        call["key"][b, ~blocks], call["value"][b, ~blocks] = np.nan, np.nan
    actual, cotangents = results_of(registry, call)
    results = expected(call, **cotangents)
    assert np.isfinite(results["out"]).all()
    for part in ("out", "lse", "query"):
        np.testing.assert_allclose(actual[part], results[part], rtol=3e-5, atol=3e-5, err_msg=part)
