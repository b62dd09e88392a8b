"""Calls against a cache with several blocks of keys and of queries, for the kernels for Hopper.

Every slot that holds no key is NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ejkernel_core import Registry
from ejkernel_ops.flash_attention.positions import ring_positions
from ejkernel_ops.flash_attention.random_calls import expected, filled

QUERIES, SLOTS = 150, 300


def of_rows(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


#: Each has tiles of queries that see no key, blocks behind the last key, and blocks with a part of the keys.
CALLS: dict[str, dict[str, Any]] = {
    "lengths": {"kv_lengths": of_rows(170, 0), "causal": True},
    "lengths-without-causal": {"kv_lengths": of_rows(290, 70)},
    "a-window-behind-the-length": {
        "q_start": of_rows(100, 250),
        "kv_lengths": of_rows(129, 64),
        "sliding_window": (40, 5),
    },
    "a-cap-and-sinks": {"kv_lengths": of_rows(200, 128), "causal": True, "logits_soft_cap": 2.0, "softmax_aux": None},
    "segments": {"kv_lengths": of_rows(100, 256), "q_segment_ids": None},
    "ring-in-two-runs": {
        "kv_positions": ring_positions(of_rows(430, 200), SLOTS),
        "q_start": of_rows(280, 60),
        "causal": True,
    },
    "window-over-a-ring": {
        "kv_positions": ring_positions(of_rows(430, 2**29), SLOTS),
        "q_start": of_rows(290, 2**29 - 160),
        "sliding_window": (60, 2**31),
    },
}


def check(name: str, dim: int, registry: Registry) -> None:
    """Raise AssertionError unless the results and gradients of a call are right."""
    call = _call(name, dim)
    rng, kernel = np.random.default_rng([4, dim]), {"backend": "gluon_sm90"}
    out, lse = registry.call("flash_attention", **call, **kernel)
    cotangents = {"d_out": rng.standard_normal(out.shape).astype("float16"), "d_lse": None}
    wrt = tuple(array for array in ("query", "key", "value", "softmax_aux") if array in call)
    gradients = registry.call("flash_attention_bwd", **call, out=out, lse=lse, **cotangents, wrt=wrt, **kernel)
    actual = {"out": out, "lse": lse, **dict(zip(wrt, gradients, strict=True))}
    results = expected(call, **cotangents)
    for part, array in actual.items():
        scale = np.abs(results[part][np.isfinite(results[part])]).max(initial=1)
        np.testing.assert_allclose(np.asarray(array, float), results[part], rtol=8e-3, atol=8e-3 * scale, err_msg=part)
    for part in ("key", "value"):
        assert (np.asarray(actual[part])[~filled(call)] == 0).all()


def _call(name: str, dim: int) -> dict[str, Any]:
    rng = np.random.default_rng([3, dim])
    call: dict[str, Any] = {"causal": False, "sliding_window": None, "logits_soft_cap": None, "return_lse": True}
    for array, length, heads in (("query", QUERIES, 2), ("key", SLOTS, 1), ("value", SLOTS, 1)):
        call[array] = rng.standard_normal((2, length, heads, dim)).astype("float16")
    call |= CALLS[name]
    if "softmax_aux" in call:
        call["softmax_aux"] = rng.standard_normal((2, 3)).astype("float16")
    if "q_segment_ids" in call:
        for side, length in (("q", QUERIES), ("kv", SLOTS)):
            call[f"{side}_segment_ids"] = np.sort(rng.integers(0, 3, (2, length)), 1).astype(np.int32)
    empty = ~filled(call)
    call["key"][empty], call["value"][empty] = np.nan, np.nan
    return call
