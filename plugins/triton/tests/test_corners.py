"""Edge cases, in values and gradients against the reference, through the interpreter."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_triton import flash_attention
from ejkernel_triton.flash_attention import backward as flash_attention_bwd
from ejkernel_triton.interpreter import compiled_for, interpreted, interpreted_registry

REGISTRY = interpreted_registry(
    {"flash_attention.triton": flash_attention, "flash_attention_bwd.triton": flash_attention_bwd}
)
BY_ATOMICS = flash_attention_bwd.Config(
    flash_attention_bwd.Pass(32, 32, 4, 1), flash_attention_bwd.Pass(32, 32, 4, 1), atomics=True
)


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu():
    with interpreted():
        yield


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def qkv(q_length: int, k_length: int, dtype: Any = np.float32) -> dict[str, Any]:
    shapes = {"query": (2, q_length, 4, 24), "key": (2, k_length, 2, 24), "value": (2, k_length, 2, 24)}
    return {name: normal(place, *shape, dtype=dtype) for place, (name, shape) in enumerate(shapes.items())}


def errors(given: dict[str, Any], cfg: Any = None) -> list[float]:
    """The errors of the output, the log-sum-exp and all gradients."""
    wrt = tuple(name for name in ("query", "key", "value", "bias", "softmax_aux") if name in given)
    right = REGISTRY.call("flash_attention", **given, return_lse=True, backend="reference")
    d_out, d_lse = (normal(7 + place, *result.shape, dtype=result.dtype) for place, result in enumerate(right))
    saved = {"out": right[0], "lse": right[1], "d_out": d_out, "d_lse": d_lse, "wrt": wrt}
    chosen = {"backend": "triton"} if cfg is None else {"cfg": cfg}
    found = REGISTRY.call("flash_attention", **given, return_lse=True, backend="triton")
    found += REGISTRY.call("flash_attention_bwd", **given, **saved, **chosen)
    right += REGISTRY.call("flash_attention_bwd", **given, **saved, backend="reference")
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(found, right, strict=True)]
    assert all(np.array_equal(np.isfinite(a), np.isfinite(b)) for a, b in pairs)
    return [
        float(np.linalg.norm((a - b)[np.isfinite(b)]) / max(np.linalg.norm(b[np.isfinite(b)]), 1e-6)) for a, b in pairs
    ]


def test_sinks_have_a_gradient_without_keys() -> None:
    assert max(errors(qkv(9, 0) | {"softmax_aux": normal(3, 4, 2)})) < 1e-5


@pytest.mark.parametrize("cap", [30.0, 1e3, 1e4, 1e6])
def test_a_large_soft_cap_is_as_precise(cap: float) -> None:
    given = qkv(40, 50)
    assert max(errors(given | {"query": 3 * given["query"], "logits_soft_cap": cap})) < 2e-5


def test_the_series_of_a_large_soft_cap_is_as_precise_up_to_a_tenth_of_it() -> None:
    given = qkv(30, 20)
    assert max(errors(given | {"query": 9 * given["query"], "logits_soft_cap": 101.0})) < 2e-5


def test_the_lowest_finite_bias_hides_a_key_beside_others() -> None:
    bias = normal(3, 1, 4, 40, 50).at[..., 3].set(np.finfo(np.float32).min)
    assert max(errors(qkv(40, 50) | {"bias": bias})) < 2e-5


@pytest.mark.parametrize(("dtype", "bias", "allowed"), [(np.float32, -200.0, 2e-5), (np.float16, -20.0, 2e-3)])
def test_atomics_do_not_add_padding(dtype: Any, bias: float, allowed: float) -> None:
    """Twenty keys in a block of 32: the weights of padding would be huge, because all logits are small."""
    given = qkv(40, 20, dtype) | {"bias": jnp.full((1, 1, 1, 20), bias, dtype)}
    wrt_less = errors(given, BY_ATOMICS)
    assert max(wrt_less[:-1]) < allowed  # the last is that of a bias which is the same for all keys: 0 by cancellation


@pytest.mark.parametrize("scale", [1e-39, 0.0, -0.3])
def test_a_scale_may_be_anything(scale: float) -> None:
    found = errors(qkv(40, 50) | {"softmax_scale": scale})
    assert max(found[:2]) < 2e-5
    if scale < 0:
        assert max(found) < 2e-5


@pytest.mark.parametrize(("q_length", "k_length"), [(1, 1), (1, 16), (16, 16), (5, 1)])
@pytest.mark.parametrize("queries", ["each", "one"])
def test_lengths_and_strides_of_1(q_length: int, k_length: int, queries: str) -> None:
    """For jax-triton an argument of 1 is a constant; lengths and strides are divided by their units."""
    bias = normal(3, 1, 4, q_length if queries == "each" else 1, k_length)
    assert max(errors(qkv(q_length, k_length) | {"bias": bias})[:-1]) < 2e-5


# -- rows so far from 0 that the log-sum-exp does not tell their sum -------------------------------------------------

FAR = jnp.array([5, 6, 69])


def far_among_near(number: float, hidden: Any = np.False_) -> dict[str, Any]:
    """Several blocks of queries and of keys. Masked keys have no huge bias, so that they would change everything."""
    far = jnp.zeros((70, 1), bool).at[FAR].set(True) & ~hidden
    numbers = number * (1 + jnp.arange(8.0).reshape(2, 4, 1, 1) / 2)
    return qkv(70, 90) | {"bias": jnp.where(far, numbers, normal(3, 2, 4, 70, 90))}


@pytest.mark.parametrize("number", [-1030.0, -5e3, -1e9, -1e30, 1e6])
def test_rows_far_from_0(number: float) -> None:
    given = far_among_near(number)
    # With queries of 0, all logits are the bias, in any order of sums.
    assert max(errors(given | {"query": given["query"].at[:, FAR].set(0)})) < 2e-5


@pytest.mark.parametrize("sign", [-1, 1])
def test_logits_far_from_0_are_as_precise_as_float32(sign: int) -> None:
    given = far_among_near(sign * 1100.0)
    # To a thousandth, because each kernel rounds in its own order.
    assert max(errors(given | {"bias": given["bias"] + normal(4, 2, 4, 70, 90)})) < 1e-3


QUERIES, KEYS = np.arange(70)[:, None], np.arange(90)[None]
OF_QUERIES, OF_KEYS = 1 + (QUERIES >= 30), 1 + (KEYS >= 50)
MASKED = np.random.default_rng(5).random((70, 90)) < 0.4
BOUNDS = {"cum_seqlens_q": jnp.array([0, 30, 70]), "cum_seqlens_k": jnp.array([0, 50, 90])}
#: Options, and what they hide.
HIDING: dict[str, tuple[dict[str, Any], Any]] = {
    "nothing": ({}, np.False_),
    "causal": ({"causal": True}, KEYS > QUERIES + 20),
    "window": ({"sliding_window": (30, 4)}, (KEYS > QUERIES + 24) | (KEYS < QUERIES - 10)),
    "mask": ({"attention_mask": jnp.asarray(~MASKED)}, MASKED),
    "packed": (BOUNDS, OF_QUERIES != OF_KEYS),
    "segments": (
        {
            "q_segment_ids": jnp.asarray(np.concatenate([OF_QUERIES.T, OF_QUERIES.T + 1]), jnp.int32),
            "kv_segment_ids": jnp.asarray(np.concatenate([OF_KEYS, OF_KEYS + 1]), jnp.int32),
        },
        OF_QUERIES != OF_KEYS,
    ),
    "cap and dropout": ({"logits_soft_cap": 2.0, "dropout_prob": 0.3, "dropout_seed": 3}, np.False_),
}


@pytest.mark.parametrize("name", HIDING)
def test_rows_far_from_0_see_the_same_keys_as_in_the_forward(name: str) -> None:
    options, hidden = HIDING[name]
    given = far_among_near(-1e9, hidden)
    if name == "packed":
        given |= {part: given[part][0] for part in ("query", "key", "value")} | {"bias": given["bias"][:1]}
    assert max(errors(given | options)) < 2e-5


@pytest.mark.parametrize("axes", [(1, 1, 1, 1), (1, 4, 70, 1), (2, 1, 1, 90)])
def test_all_rows_may_be_far(axes: tuple[int, ...]) -> None:
    given = qkv(70, 90) | {"bias": jnp.full(axes, -1e9)}
    assert max(errors(given | {"causal": True})) < 2e-5


@pytest.mark.long
def test_rows_far_from_0_may_have_only_sinks() -> None:
    """Two logits are neighbours in float32, and the same number in units of log2."""
    sinks = jnp.full((4, 2), -2e9).at[0].set([-999999872.0, -999999808.0]).at[2].set(0.0)
    mask = jnp.ones((70, 90), bool).at[FAR[:2]].set(False)
    given = far_among_near(-2e9) | {"softmax_aux": sinks, "attention_mask": mask}
    assert max(errors(given)) < 2e-5


@pytest.mark.long
def test_no_weight_is_above_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product may be rounded differently than in the kernel that computes the maximum."""
    exact_lse = flash_attention_bwd._exact_lse

    def lower(*arguments: Any) -> Any:
        lse, factor = exact_lse(*arguments)
        return jnp.where(factor < 1, jnp.nextafter(lse, -jnp.inf), lse), factor

    monkeypatch.setattr(flash_attention_bwd, "_exact_lse", lower)
    jax.clear_caches()
    for cfg in (None, BY_ATOMICS):
        assert max(errors(far_among_near(-1e9), cfg)) < 2e-5
    jax.clear_caches()


def test_boundaries_after_the_last_token_do_not_read_past_it() -> None:
    given = {name: array[0] for name, array in qkv(32, 32).items()}
    bounds = jnp.array([0, 10, 80])
    out = REGISTRY.call("flash_attention", **given, cum_seqlens_q=bounds, cum_seqlens_k=bounds, backend="triton")
    right = jnp.array([0, 10, 32])
    expected = REGISTRY.call("flash_attention", **given, cum_seqlens_q=right, cum_seqlens_k=right, backend="reference")
    np.testing.assert_allclose(out[:10], expected[:10], atol=1e-5)
    assert np.isfinite(out).all()


def test_programs_are_on_one_axis() -> None:
    """The limit of the other axes is 65,535, which batch times heads can exceed."""
    query = jax.ShapeDtypeStruct((8192, 16, 16, 32), jnp.bfloat16)

    def pulled(q: Any) -> Any:
        out, pull_back = jax.vjp(lambda q: _attend(q), q)
        return pull_back(out)

    for kernel in compiled_for("NVIDIA H200", pulled, query):
        assert kernel.grid == (8192 * 16, 1, 1)


def _attend(query: Any) -> Any:
    import ejkernel_core

    return ejkernel_core.call("flash_attention", query, query, query, backend="triton")


def test_a_bias_of_more_than_2_to_the_31_elements_has_strides_of_64_bits() -> None:
    """Compiled only: there is no such array here. A 32-bit product of its stride would be negative."""
    import ejkernel_core

    query = jax.ShapeDtypeStruct((2, 8192, 32, 32), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((2, 32, 8192, 8192), jnp.bfloat16)

    def attend(q: Any, b: Any) -> Any:
        return ejkernel_core.call("flash_attention", q, q, q, b, backend="triton")

    (kernel,) = compiled_for("NVIDIA H200", attend, query, bias)
    products = [line for line in kernel.ttir.splitlines() if "arith.muli" in line and re.search(r"%bias_[bh]\b", line)]
    assert not [line for line in products if ": i32" in line]
    assert 'loc("bias_b"' in kernel.ttir
