"""``linear_log_probs`` and ``linear_argmax`` against NumPy in float64, their edges, and what their calls refuse."""

from __future__ import annotations

import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops import linear_argmax, linear_log_probs
from ejkernel_ops.linear_log_probs.random_calls import check

COUNT = int(os.environ.get("EJKERNEL_RANDOM_CALLS", "8"))
BACKENDS = ("reference", "xla")
DTYPES = ("float32", "bfloat16", "float16", "float64")
RNG = np.random.default_rng(53)
HIDDEN, WEIGHT = RNG.standard_normal((6, 8)).astype(np.float32), RNG.standard_normal((8, 20)).astype(np.float32)
LABELS = np.array([3, -100, 19, 0, 7, -100], np.int32)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# -- random calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_calls(seed: int, backend: str) -> None:
    check(seed, DTYPES[seed % 4], backend=backend)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 400))
def test_many_random_calls(seed: int, backend: str) -> None:
    check(seed, DTYPES[seed % 4], backend=backend)


# -- edges -------------------------------------------------------------------------------------------------------------


def test_ignored_rows_are_0_and_may_hold_anything(backend: str) -> None:
    hidden = np.where((LABELS == -100)[:, None], np.nan, HIDDEN).astype(np.float32)

    def run(hidden: Any, weight: Any) -> Any:
        options = {"logits_soft_cap": 3.0, "temperature": 0.5, "return_entropy": True, "backend": backend}
        return sum(value.sum() for value in linear_log_probs(hidden, weight, LABELS, **options))

    log_probs, entropy = linear_log_probs(hidden, WEIGHT, LABELS, return_entropy=True, backend=backend)
    assert not np.asarray(log_probs)[LABELS == -100].any()
    assert not np.asarray(entropy)[LABELS == -100].any()
    actual = jax.grad(run, (0, 1))(jnp.asarray(hidden), jnp.asarray(WEIGHT))
    expected = jax.grad(run, (0, 1))(jnp.asarray(HIDDEN), jnp.asarray(WEIGHT))
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-7)


def test_the_argmax_is_the_lowest_of_several(backend: str) -> None:
    weight = np.zeros((8, 20), np.float32)
    weight[:, [4, 9, 17]] = 1
    hidden = np.stack([np.ones(8), -np.ones(8)]).astype(np.float32)
    tokens = linear_argmax(hidden, weight, backend=backend)
    assert tokens.dtype == jnp.int32
    assert tokens.tolist() == [4, 0]
    assert linear_argmax(hidden, weight.T, transpose_weight=True, backend=backend).tolist() == [4, 0]
    bias = np.where(np.arange(20) < 9, -np.inf, 0).astype(np.float32)
    assert linear_argmax(hidden, weight, bias=bias, backend=backend).tolist() == [9, 10]
    # Above the cap all are equal.
    assert linear_argmax(1e6 * hidden, np.abs(WEIGHT), logits_soft_cap=1.0, backend=backend).tolist()[0] == 0


def test_the_argmax_is_a_constant_to_a_derivative(backend: str) -> None:
    def loss(hidden: Any) -> Any:
        tokens = linear_argmax(hidden, WEIGHT, backend=backend)
        return (hidden * tokens[:, None]).sum()

    tokens = np.argmax(HIDDEN.astype(np.float64) @ WEIGHT, -1)
    np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(HIDDEN)), np.broadcast_to(tokens[:, None], HIDDEN.shape))


def test_an_entropy_costs_no_product_more() -> None:
    def run(hidden: Any, weight: Any, return_entropy: bool) -> Any:
        return jax.tree.leaves(linear_log_probs(hidden, weight, LABELS, return_entropy=return_entropy))[-1].sum()

    for has_entropy in (False, True):
        text = jax.jit(run, static_argnums=2).lower(HIDDEN, WEIGHT, has_entropy).as_text()
        assert len(re.findall(r"stablehlo\.dot_general", text)) == 1
        gradient = (
            jax.jit(jax.value_and_grad(run, (0, 1)), static_argnums=2).lower(HIDDEN, WEIGHT, has_entropy).as_text()
        )
        assert len(re.findall(r"stablehlo\.dot_general", gradient)) == 4


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"labels": LABELS.astype(np.float32)}, TypeError, "labels: takes integers; got float32"),
        ({"labels": LABELS[:5]}, ValueError, "labels"),
        ({"weight": WEIGHT[:7]}, ValueError, "weight"),
        ({"weight": np.zeros((8, 0), np.float32)}, ValueError, "weight"),
        ({"bias": np.zeros(19, np.float32)}, ValueError, "bias"),
        ({"temperature": 0.0}, ValueError, "temperature: takes a number above 0; got 0.0"),
        ({"temperature": -1.0}, ValueError, "temperature: takes a number above 0; got -1.0"),
        ({"temperature": None}, TypeError, "temperature: takes a number"),
        ({"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap: takes a number above 0"),
        ({"return_entropy": 1}, TypeError, "return_entropy: takes True or False"),
        ({"tokens": LABELS}, TypeError, "'tokens' is called 'labels' here"),
    ],
)
def test_bad_input_is_refused_by_name(change: Any, kind: type[Exception], words: str) -> None:
    arrays = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS}
    with pytest.raises(kind, match=f"^linear_log_probs: .*{re.escape(words)}"):
        jax.eval_shape(lambda: linear_log_probs(**{**arrays, **change}))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"hidden": HIDDEN.astype(np.int32)}, TypeError, "hidden: takes float16"),
        ({"weight": WEIGHT.astype(jnp.bfloat16)}, TypeError, "weight: takes the dtype of hidden"),
        ({"weight": WEIGHT[:7]}, ValueError, "weight"),
        ({"transpose_weight": 1}, TypeError, "transpose_weight: takes True or False"),
    ],
)
def test_bad_input_of_the_argmax_is_refused_by_name(change: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=f"^linear_argmax: .*{re.escape(words)}"):
        jax.eval_shape(lambda: linear_argmax(**{"hidden": HIDDEN, "weight": WEIGHT, **change}))


def test_labels_are_checked_by_value() -> None:
    linear_log_probs(HIDDEN, WEIGHT, LABELS, validate=True)
    linear_argmax(HIDDEN, WEIGHT, validate=True)
    with pytest.raises(ValueError, match=r"labels\[1\] must be from 0 to 19, or -100, which is ignored; got 20"):
        linear_log_probs(HIDDEN, WEIGHT, np.array([3, 20, 0, 0, 7, -100]), validate=True)
