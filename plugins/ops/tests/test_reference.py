"""The reference against attention in slow loops over Python numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import pytest

import ejkernel_core
from ejkernel_ops.flash_attention import examples
from ejkernel_testing import pairwise

WORD = 2**32
Arguments = Mapping[str, Any]


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % WORD
    x ^= x >> 15
    x = x * 0x846CA68B % WORD
    return x ^ (x >> 16)


def survives(seed: int, probability: float, row: int, query: int, key: int) -> bool:
    """The dropout formula of the documentation, in Python integers."""
    state = mix((seed + 0x9E3779B9) % WORD)
    state = mix(mix(state ^ row) ^ query)
    return mix((state + key * 0x9E3779B9) % WORD) >= round(probability * WORD)


def by_loops(a: Arguments) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of a call, packed or not, in the caller's layout."""
    if a.get("cum_seqlens_q") is None:
        return over_batch(a, lambda b, i, j: True, lambda b, i: a["key"].shape[1] - a["query"].shape[1])
    ends_q, ends_k = a["cum_seqlens_q"].tolist(), a["cum_seqlens_k"].tolist()

    def sequence(ends: list[int], token: int) -> int | None:
        return next((s for s in range(len(ends) - 1) if ends[s] <= token < ends[s + 1]), None)

    def is_same_sequence(b: int, i: int, j: int) -> bool:
        return sequence(ends_q, i) is not None and sequence(ends_q, i) == sequence(ends_k, j)

    def offset(b: int, i: int) -> int:
        s = sequence(ends_q, i)
        return 0 if s is None else ends_k[s + 1] - ends_q[s + 1]

    whole = {
        n: v[None] if n in ("query", "key", "value", "q_segment_ids", "kv_segment_ids") else v for n, v in a.items()
    }
    out, lse = over_batch(whole, is_same_sequence, offset)
    return out[0], lse[0]


def over_batch(
    a: Arguments, is_same_sequence: Callable[[int, int, int], bool], offset: Callable[[int, int], int]
) -> tuple[np.ndarray, np.ndarray]:
    batch, q_length, heads, _ = a["query"].shape
    out, lse = np.zeros((batch, q_length, heads, a["value"].shape[3])), np.zeros((batch, heads, q_length))
    for b in range(batch):
        for h in range(heads):
            for i in range(q_length):
                out[b, i, h], lse[b, h, i] = row(
                    a, b, h, i, lambda j, b=b, i=i: is_same_sequence(b, i, j), i + offset(b, i)
                )
    return out, lse


def row(a: Arguments, b: int, h: int, i: int, is_same_sequence: Callable[[int], bool], own: int) -> tuple[Any, float]:
    """One query of one head; ``own`` is the index of its own key."""
    keys, values = a["key"][b], a["value"][b]
    group = a["query"].shape[2] // keys.shape[1]
    logits = {
        j: logit(a, b, h, i, keys[j, h // group], j)
        for j in range(len(keys))
        if is_same_sequence(j) and sees(a, b, h, i, j, own)
    }
    sinks = [] if a.get("softmax_aux") is None else np.ravel(a["softmax_aux"][h]).tolist()
    total = math.fsum(math.exp(x) for x in [*logits.values(), *sinks])
    result = np.zeros(values.shape[-1])
    for j, x in logits.items():
        weight = math.exp(x) / total if total else 0.0
        if a.get("dropout_prob"):
            is_dropped = not survives(int(a["dropout_seed"]), a["dropout_prob"], b * a["query"].shape[2] + h, i, j)
            weight = 0.0 if is_dropped else weight / (1 - a["dropout_prob"])
        result += weight * values[j, h // group]
    return result, math.log(total) if total else -math.inf


def logit(a: Arguments, b: int, h: int, i: int, key: np.ndarray, j: int) -> float:
    query = a["query"][b, i, h]
    scale = a.get("softmax_scale")
    x = math.fsum(query * key) * (1 / math.sqrt(len(query)) if scale is None else scale)
    if a.get("logits_soft_cap"):
        x = a["logits_soft_cap"] * math.tanh(x / a["logits_soft_cap"])
    return x + (0.0 if a.get("bias") is None else float(at(a["bias"], a, b, h, i, j)))


def sees(a: Arguments, b: int, h: int, i: int, j: int, own: int) -> bool:
    if a.get("causal") and j > own:
        return False
    window = a.get("sliding_window")
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        if not own - left <= j <= own + right:
            return False
    if a.get("q_segment_ids") is not None and not a["q_segment_ids"][b, i] == a["kv_segment_ids"][b, j] > 0:
        return False
    return a.get("attention_mask") is None or bool(at(a["attention_mask"], a, b, h, i, j))


def at(array: np.ndarray, a: Arguments, b: int, h: int, i: int, j: int) -> Any:
    """One element of an array that broadcasts."""
    full = (*a["query"].shape[:1], a["query"].shape[2], a["query"].shape[1], a["key"].shape[1])
    return np.broadcast_to(array, full)[b, h, i, j]


#: The grid's factors, with sizes that are small enough for loops.
SMALL = {
    **examples.FACTORS,
    "q_length": (1, 5, 7),
    "head_dim": (2, 5),
    "group": (1, 2, 4),
    "window": (None, 2, (3, 1), (0, 0)),
}
ROWS = pairwise(SMALL, examples.is_possible)


def label(row: Mapping[str, Any]) -> str:
    return "-".join(map(str, row.values()))


@pytest.fixture(autouse=True)
def few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(examples.K_LENGTH, "more", lambda n: n + 3)


@pytest.mark.parametrize("row", ROWS, ids=label)
def test_values(row: Mapping[str, Any]) -> None:
    arguments = {**examples.grid_arguments(row, 0), "return_lse": True}
    expected = by_loops(arguments)
    with jax.enable_x64(True):
        results = ejkernel_core.call("flash_attention", **arguments, backend="reference")
    for result, right in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("row", ROWS[::4], ids=label)
def test_gradients(row: Mapping[str, Any]) -> None:
    """Along a random direction, against central differences of the loops."""
    arguments = {**examples.grid_arguments(row, 0), "return_lse": True}
    primals = {name: arguments[name] for name in examples.DIFFERENTIABLE if arguments.get(name) is not None}
    step = {name: 1e-5 * examples.normal(name, 9, array.shape) for name, array in primals.items()}
    is_finite = np.isfinite(by_loops(arguments)[1])

    def loss(out: Any, lse: Any, numpy: Any) -> Any:
        return (out * examples.normal("d_out", 0, out.shape)).sum() + numpy.where(
            is_finite, lse * examples.normal("d_lse", 0, lse.shape), 0
        ).sum()

    def loss_of_reference(primals: Mapping[str, Any]) -> Any:
        out, lse = ejkernel_core.call("flash_attention", **{**arguments, **primals}, backend="reference")
        return loss(out, jax.numpy.where(is_finite, lse, 0), jax.numpy)

    def loss_of_loops(sign: int) -> float:
        out, lse = by_loops({**arguments, **{name: primals[name] + sign * step[name] for name in primals}})
        return float(loss(out, np.where(is_finite, lse, 0), np))

    with jax.enable_x64(True):
        gradients = jax.tree.map(np.asarray, jax.jit(jax.grad(loss_of_reference))(primals))
    for name in primals:
        assert np.isfinite(gradients[name]).all(), name
    slope = sum(float(np.sum(gradients[name] * step[name])) for name in primals)
    assert slope == pytest.approx((loss_of_loops(1) - loss_of_loops(-1)) / 2, rel=1e-6, abs=1e-12)


def test_the_program_has_no_mask_as_a_constant() -> None:
    array = jax.ShapeDtypeStruct((1, 2048, 1, 8), "float32")

    def attention(query: Any, key: Any, value: Any) -> Any:
        options = {"causal": True, "sliding_window": (100, 0), "backend": "reference"}
        return ejkernel_core.call("flash_attention", query, key, value, **options).sum()

    for function in (attention, jax.grad(attention, (0, 1, 2))):
        assert len(jax.jit(function).lower(array, array, array).as_text()) < 2048 * 2048 / 8
