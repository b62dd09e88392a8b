"""Random calls with positions, as a cache makes them, and a proof of a kernel on them: `check`.

Results and gradients are compared with those of `expected`, which is NumPy in float64, one head at a time, and reads
only the slots that hold a key. The keys and values in all others are NaN. Five calls in a row have one shape and the
same options, so that they are compiled once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

import ejkernel_core

Arguments = dict[str, Any]

SAME_SHAPE = 5
#: By dtype: the largest error, as a part of the largest number of the array, or of 1: a gradient of 0 is a difference
#: of numbers of that size.
TOLERANCES = {"float64": 1e-11, "float32": 3e-5, "float16": 8e-3, "bfloat16": 5e-2}
DIFFERENTIABLE = ("query", "key", "value", "bias", "softmax_aux")


# -- the proof -----------------------------------------------------------------------------------------------------


def check(
    seed: int,
    *,
    registry: Any = None,
    backend: str | None = None,
    cfg: Any = None,
    backward: str | None = None,
    backward_cfg: Any = None,
    dtype: str = "float32",
    without: frozenset[str] = frozenset(),
    gradients: bool = True,
) -> None:
    """Raise AssertionError unless kernels have the right results and gradients for the random call ``seed``.

    The kernels are those of ``backend`` and ``backward``, which is by default the same one. ``without`` are the
    arguments that they do not take, or "other value_dim". Two runs of the forward have to give the same bits.
    """
    registry = ejkernel_core.registry if registry is None else registry
    call = _rounded(random_call(seed, without), dtype)
    options = {"backend": backend, "cfg": cfg}
    out, lse = registry.call("flash_attention", **call, **options)
    again, _ = registry.call("flash_attention", **call, **options)
    assert np.asarray(out).tobytes() == np.asarray(again).tobytes(), f"random call {seed}: other bits the second time"
    cotangents = _cotangents(seed, out, lse)
    results = expected(call, **cotangents)
    actual = {"out": out, "lse": lse}
    if gradients:
        wrt = tuple(name for name in DIFFERENTIABLE if call.get(name) is not None)
        saved = {"out": out, "lse": lse, **cotangents, "wrt": wrt}
        options = {"backend": backward or backend, "cfg": backward_cfg}
        actual |= zip(wrt, registry.call("flash_attention_bwd", **call, **saved, **options), strict=True)
    for name, array in actual.items():
        _compare(f"random call {seed}: {name}", array, results[name], TOLERANCES[dtype])
    if gradients:
        unfilled = ~filled(call)
        for name in ("key", "value"):
            assert not np.asarray(actual[name])[unfilled].any(), f"random call {seed}: d_{name} of an empty slot"


def _rounded(call: Arguments, dtype: str) -> Arguments:
    """The call with its numbers in a dtype."""
    numbers = {name for name, x in call.items() if isinstance(x, np.ndarray) and x.dtype == np.float64}
    return {name: jnp.asarray(x, dtype) if name in numbers else x for name, x in call.items()}


def _cotangents(seed: int, out: Any, lse: Any) -> Arguments:
    rng = np.random.default_rng([2, seed])
    d_out, d_lse = (jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in (out, lse))
    return {"d_out": d_out, "d_lse": d_lse if _kind(seed).random() < 0.5 else None}


def _compare(name: str, actual: Any, results: Any, tolerance: float) -> None:
    actual = np.asarray(actual, np.float64)
    assert actual.shape == results.shape, f"{name}: {actual.shape} in the place of {results.shape}"
    is_finite = np.isfinite(results)  # the lse of a row that sees nothing is -inf
    np.testing.assert_array_equal(actual[~is_finite], results[~is_finite], err_msg=name)
    numbers, scale = results[is_finite], np.abs(results[is_finite]).max(initial=1)
    np.testing.assert_allclose(actual[is_finite], numbers, rtol=tolerance, atol=tolerance * scale, err_msg=name)


# -- the calls -----------------------------------------------------------------------------------------------------


def _kind(seed: int) -> np.random.Generator:
    """Numbers that are the same for all calls of one shape."""
    return np.random.default_rng([1, seed // SAME_SHAPE])


def random_call(seed: int, without: frozenset[str] = frozenset()) -> Arguments:
    """The arguments of a random call, in float64. The last of ``SAME_SHAPE`` calls have the same shapes and options."""
    kind, rng = _kind(seed), np.random.default_rng([0, seed])
    kind.random()  # that of the cotangents
    batch, kv_heads, group = (int(n) for n in kind.integers(1, (4, 3, 5)))
    q_length, slots = int(kind.choice([1, 1, 2, 4, 7, 16, 33])), int(kind.choice([1, 6, 16, 37, 64, 100, 130]))
    dim = int(kind.choice([8, 16, 32]))
    value_dim = dim + 8 if kind.random() < 0.2 and "other value_dim" not in without else dim
    heads, full = kv_heads * group, (batch, kv_heads * group, q_length, slots)
    call: Arguments = {
        "query": rng.standard_normal((batch, q_length, heads, dim)),
        "key": rng.standard_normal((batch, slots, kv_heads, dim)),
        "value": rng.standard_normal((batch, slots, kv_heads, value_dim)),
        "causal": bool(kind.random() < 0.6),
        "sliding_window": _window(kind),
        "logits_soft_cap": 2.0 if kind.random() < 0.3 else None,
        "softmax_aux": rng.standard_normal((heads, int(kind.integers(1, 3)))) if kind.random() < 0.3 else None,
        "attention_mask": rng.random((batch, 1, q_length, slots)) < 0.8 if kind.random() < 0.15 else None,
        "bias": rng.standard_normal(full) if kind.random() < 0.15 else None,
        "return_lse": True,
    }
    if kind.random() < 0.15:
        call |= {"q_segment_ids": _ids(rng, batch, q_length), "kv_segment_ids": _ids(rng, batch, slots)}
    call |= _positions(kind, rng, batch, q_length, slots)
    call = {name: None if name in without else value for name, value in call.items()}
    unfilled = ~filled(call)
    call["key"][unfilled], call["value"][unfilled] = np.nan, np.nan
    return call


def _window(kind: np.random.Generator) -> tuple[int, int] | None:
    left, right = (int(n) for n in kind.integers(0, 40, 2))
    windows = [None, None, (0, 0), (2**31, 3), (left, right)]
    return windows[int(kind.integers(len(windows)))]


def _ids(rng: np.random.Generator, batch: int, length: int) -> Any:
    return np.sort(rng.integers(0, 3, (batch, length)), 1).astype(np.int32)


def _positions(kind: np.random.Generator, rng: np.random.Generator, batch: int, q_length: int, slots: int) -> Arguments:
    form = kind.choice(["start", "lengths", "start and lengths", "ring", "any positions"])
    is_scalar = kind.random() < 0.3
    rows = () if is_scalar else (batch,)
    choices = np.stack([np.full(rows, 0), np.full(rows, min(1, slots)), np.full(rows, slots)])
    lengths = np.where(rng.random(rows) < 0.5, rng.choice(choices), rng.integers(0, slots + 1, rows)).astype(np.int32)
    start = rng.integers(-q_length - 3, slots + 6, rows).astype(np.int32)
    if form == "start":
        return {"q_start": start}
    if form == "lengths":
        return {"kv_lengths": lengths}
    if form == "start and lengths":
        return {"kv_lengths": lengths, "q_start": start}
    far = int(rng.choice([0, 0, 3 * slots, 2**20, 2**29 - 400]))
    end = rng.integers(0, 2 * slots + 2, (batch, 1)) + far  # the keys before it are in the ring
    last = end - 1
    positions = last - (last - np.arange(slots)) % slots
    if form == "any positions":  # in any order, with empty slots between them
        positions = rng.permuted(positions, axis=1)
        positions[rng.random(positions.shape) < 0.3] = -1
    positions = np.where(positions < 0, -1, positions).astype(np.int32)
    starts = end[:, 0] - q_length + rng.integers(-1, 2, batch)
    return {"kv_positions": positions, "q_start": (starts[0] if is_scalar else starts).astype(np.int32)}


# -- the results ---------------------------------------------------------------------------------------------------


def filled(call: Mapping[str, Any]) -> Any:
    """Which slots hold a key, (batch, slots)."""
    batch, slots = call["key"].shape[:2]
    if call.get("kv_positions") is not None:
        return np.asarray(call["kv_positions"]) >= 0
    lengths = slots if call.get("kv_lengths") is None else np.asarray(call["kv_lengths"])
    return np.arange(slots)[None] < np.broadcast_to(lengths, batch)[:, None]


def seen(call: Mapping[str, Any]) -> Any:
    """Which queries see which slots, (batch, heads, queries, slots), by the words of the operation's page."""
    (batch, q_length, heads, _), slots = call["query"].shape, call["key"].shape[1]
    lengths = slots if call.get("kv_lengths") is None else np.asarray(call["kv_lengths"])
    start = lengths - q_length if call.get("q_start") is None else np.asarray(call["q_start"])
    mask = np.zeros((batch, heads, q_length, slots), bool)
    is_filled = filled(call)
    for b, i, j in np.ndindex(batch, q_length, slots):
        p = int(np.broadcast_to(start, batch)[b]) + i
        k = j if call.get("kv_positions") is None else int(call["kv_positions"][b, j])
        left, right = call["sliding_window"] or (np.inf, np.inf)
        is_seen = is_filled[b, j] and -left <= k - p <= right and not (call["causal"] and k > p)
        if call.get("q_segment_ids") is not None:
            is_seen = is_seen and call["q_segment_ids"][b, i] == call["kv_segment_ids"][b, j] > 0
        mask[b, :, i, j] = is_seen
    return mask if call.get("attention_mask") is None else mask & np.asarray(call["attention_mask"])


def expected(call: Mapping[str, Any], d_out: Any, d_lse: Any) -> dict[str, Any]:
    """The results of a call, and the gradients of its arrays, in float64."""
    wide = {name: np.asarray(call[name], np.float64) for name in DIFFERENTIABLE if call.get(name) is not None}
    batch, q_length, heads, dim = wide["query"].shape
    kv_heads, value_dim = wide["key"].shape[2], wide["value"].shape[3]
    results = {name: np.zeros(array.shape) for name, array in wide.items()}
    results |= {"out": np.zeros((batch, q_length, heads, value_dim)), "lse": np.zeros((batch, heads, q_length))}
    mask, d_out = seen(call), np.asarray(d_out, np.float64)
    d_lse = np.zeros(results["lse"].shape) if d_lse is None else np.asarray(d_lse, np.float64)
    scale, cap = dim**-0.5, call["logits_soft_cap"]
    for b, h in np.ndindex(batch, heads):
        slots, kv = np.flatnonzero(mask[b, h].any(0)), h // (heads // kv_heads)
        query, key, value = wide["query"][b, :, h], wide["key"][b, slots, kv], wide["value"][b, slots, kv]
        x = scale * query @ key.T
        tanh = np.zeros_like(x) if cap is None else np.tanh(x / cap)
        x = x if cap is None else cap * tanh
        x = x + wide["bias"][b, h][:, slots] if "bias" in wide else x
        sinks = np.tile(wide["softmax_aux"][h] if "softmax_aux" in wide else np.zeros(0), (q_length, 1))
        row = np.concatenate([np.where(mask[b, h][:, slots], x, -np.inf), sinks], 1)
        peak = row.max(1, keepdims=True, initial=-1e300)
        total = np.exp(row - peak).sum(1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse = peak + np.log(total)
        weights = np.exp(row - peak) / np.where(total > 0, total, 1)
        w = weights[:, : len(slots)]
        out, d = w @ value, d_out[b, :, h]
        delta = (out * d).sum(1, keepdims=True) - d_lse[b, h][:, None]
        d_x = w * (d @ value.T - delta)
        results["out"][b, :, h], results["lse"][b, h] = out, lse[:, 0]
        results["value"][b, slots, kv] += w.T @ d
        if "softmax_aux" in wide:
            results["softmax_aux"][h] -= (weights[:, len(slots) :] * delta).sum(0)
        if "bias" in wide:
            results["bias"][b, h][:, slots] = d_x
        d_x = scale * d_x * (1 - tanh**2)
        results["query"][b, :, h] = d_x @ key
        results["key"][b, slots, kv] += d_x.T @ query
    return results
