"""``fused_linear_cross_entropy`` against NumPy in float64, its edges, and what its calls refuse."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_ops import fused_linear_cross_entropy
from ejkernel_ops.fused_linear_cross_entropy import random_calls

COUNT = int(os.environ.get("EJKERNEL_RANDOM_CALLS", "6"))
BACKENDS = ("reference", "xla")
REDUCTIONS = ("mean", "sum", "none")
RNG = np.random.default_rng(52)
HIDDEN, WEIGHT = RNG.standard_normal((6, 8)).astype(np.float32), RNG.standard_normal((8, 20)).astype(np.float32)
LABELS = np.array([3, -100, 19, 0, 7, -100], np.int32)
Function = Callable[..., Any]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def plain(hidden: Any, weight: Any, labels: Any) -> Any:
    """The losses of the rows from all logits, by JAX."""
    log_probs = jax.nn.log_softmax((hidden @ weight).astype(jnp.float32))
    counts = labels != -100
    return jnp.where(counts, -jnp.take_along_axis(log_probs, jnp.where(counts, labels, 0)[..., None], -1)[..., 0], 0)


# -- values and gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("seed", range(COUNT))
def test_random_calls_of_the_reference(seed: int, dtype: str) -> None:
    random_calls.check(seed, dtype=dtype, backend="reference")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(600))
def test_many_random_calls_of_the_reference(seed: int) -> None:
    dtype = ("float32", "float64", "bfloat16", "float16")[seed % 4]
    random_calls.check(1000 + seed, dtype=dtype, backend="reference")


def test_the_mean_is_over_the_labels_that_count(backend: str) -> None:
    loss = fused_linear_cross_entropy(HIDDEN, WEIGHT, LABELS, backend=backend)
    rows = np.asarray(plain(HIDDEN, WEIGHT, LABELS), np.float64)
    np.testing.assert_allclose(loss, rows.sum() / 4, rtol=1e-6)
    weights = np.array([1, 9, 0, 2, 0.5, 7], np.float32)
    weighted = fused_linear_cross_entropy(HIDDEN, WEIGHT, LABELS, token_weights=weights, backend=backend)
    np.testing.assert_allclose(weighted, (rows * weights).sum() / 3.5, rtol=1e-6)


@pytest.mark.parametrize("weights", [None, np.zeros(6, np.float32)])
def test_a_mean_of_nothing_is_0_with_gradients_of_0(backend: str, weights: Any) -> None:
    labels = np.full(6, -100, np.int32) if weights is None else LABELS
    run = lambda h, w: fused_linear_cross_entropy(h, w, labels, token_weights=weights, backend=backend)
    loss, gradients = jax.value_and_grad(run, (0, 1))(jnp.asarray(HIDDEN), jnp.asarray(WEIGHT))
    assert loss == 0
    for gradient in gradients:
        assert not np.asarray(gradient).any()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("options", [{}, {"logits_soft_cap": 3.0, "z_loss": 0.1, "label_smoothing": 0.1}])
def test_rows_that_are_ignored_may_hold_anything(backend: str, reduction: Any, value: float, options: Any) -> None:
    hidden = np.where((LABELS == -100)[:, None], value, HIDDEN).astype(np.float32)

    def run(hidden: Any, weight: Any) -> Any:
        call = {"reduction": reduction, "backend": backend, **options}
        return fused_linear_cross_entropy(hidden, weight, LABELS, **call).sum()

    actual = jax.value_and_grad(run, (0, 1))(jnp.asarray(hidden), jnp.asarray(WEIGHT))
    expected = jax.value_and_grad(run, (0, 1))(jnp.asarray(HIDDEN), jnp.asarray(WEIGHT))
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_second_derivatives_where_ignored_rows_are_nan(backend: str, reduction: Any) -> None:
    def second(hidden: Any) -> Any:
        def run(hidden: Any, weight: Any) -> Any:
            return fused_linear_cross_entropy(hidden, weight, LABELS, reduction=reduction, backend=backend).sum()

        def squares(hidden: Any, weight: Any) -> Any:
            return sum((gradient**2).sum() for gradient in jax.grad(run, (0, 1))(hidden, weight))

        return jax.grad(squares, (0, 1))(jnp.asarray(hidden), jnp.asarray(WEIGHT))

    hidden = np.where((LABELS == -100)[:, None], np.nan, HIDDEN).astype(np.float32)
    for actual, expected in zip(second(hidden), second(HIDDEN), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_row_whose_lse_has_a_cotangent_of_0_has_derivatives_by_it(backend: str) -> None:
    """Also an ignored one."""

    def sums(cotangents: Any) -> Any:
        def run(hidden: Any) -> Any:
            call = {"reduction": "none", "return_lse": True, "backend": backend}
            return (fused_linear_cross_entropy(hidden, WEIGHT, LABELS, **call)[1] * cotangents).sum()

        return (jax.grad(run)(jnp.asarray(HIDDEN)) * np.arange(HIDDEN.size).reshape(HIDDEN.shape)).sum()

    gradient, zeros = jax.grad(sums)(jnp.zeros(len(LABELS))), np.zeros(len(LABELS), np.float32)
    expected = [sums(zeros + (np.arange(len(LABELS)) == row)) for row in range(len(LABELS))]
    np.testing.assert_allclose(gradient, expected, rtol=1e-4)


def test_labels_of_64_bits_are_not_cut(backend: str) -> None:
    with jax.enable_x64(True):
        labels = jnp.array([2**32 + 4, 2**32 - 100, -(2**32), 3, 0, -100])
        call = {"reduction": "none", "return_lse": True, "backend": backend}
        loss, lse = fused_linear_cross_entropy(HIDDEN, WEIGHT, labels, **call)
    np.testing.assert_allclose(loss[:3], lse[:3], rtol=1e-6)
    assert abs(loss[3] - lse[3]) > 1e-3


def test_a_label_far_before_a_shard_is_not_in_it(backend: str) -> None:
    labels = np.full(6, -(2**31) + 3, np.int32)
    call = {"vocab_start": 2**31 - 5, "reduction": "none", "return_lse": True, "backend": backend}
    loss, lse = fused_linear_cross_entropy(HIDDEN, WEIGHT, labels, **call)
    np.testing.assert_allclose(loss, lse, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_of_small_probabilities_are_not_filtered_away(backend: str, reduction: Any, dtype: str) -> None:
    """Of 5,000 words each has a probability of 1e-8, which would be 0 in float16 and below a bit of bfloat16."""
    bias = np.full(5001, np.log(1e-8), np.float32)
    bias[0] = 0
    hidden, weight = np.ones((4, 1)), np.zeros((1, 5001))

    def run(weight: Any) -> Any:
        arrays = (jnp.asarray(hidden, dtype), weight, np.zeros(4, np.int32))
        loss = fused_linear_cross_entropy(*arrays, bias=bias, reduction=reduction, backend=backend)
        return 4096 * loss.sum() / loss.size

    gradient = np.asarray(jax.grad(run)(jnp.asarray(weight, dtype)), np.float64)[0, 1:]
    right = 4096 * 1e-8 / (1 + 5e-5)
    tolerance = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 2e-3}[dtype]
    np.testing.assert_allclose(gradient, right, rtol=tolerance)


def test_large_logits(backend: str) -> None:
    """Of 1e4, whose exponential is infinite; the loss has the digits of their differences."""
    weight = np.array([[1e4, 1e4 - 1, -1e4]], np.float32)
    arrays = jnp.ones((2, 1)), jnp.asarray(weight), jnp.array([0, 2])
    losses = fused_linear_cross_entropy(*arrays, reduction="none", backend=backend)
    small = np.log1p(np.exp(-1.0))
    np.testing.assert_allclose(losses, [small, 2e4 + small], rtol=1e-6)
    gradient = jax.grad(lambda w: fused_linear_cross_entropy(arrays[0], w, arrays[2], backend=backend))(arrays[1])
    p = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(gradient, [[(2 * p - 1) / 2, 1 - p, -0.5]], rtol=1e-5)


def test_words_with_a_bias_of_minus_infinity(backend: str) -> None:
    bias = np.where(np.arange(20) % 2, -np.inf, 0).astype(np.float32)
    labels = np.array([2, 4, 18, -100, 0, 3])  # the last one cannot be

    def run(weight: Any, bias: Any) -> Any:
        return fused_linear_cross_entropy(HIDDEN, weight, labels, bias=bias, reduction="none", backend=backend)

    losses = run(WEIGHT, bias)
    even = np.asarray(plain(HIDDEN, WEIGHT[:, ::2], np.array([1, 2, 9, -100, 0, 0])))
    np.testing.assert_allclose(losses[:5], even[:5], rtol=1e-5)
    assert losses[5] == np.inf
    gradients = jax.grad(lambda w, b: run(w, b)[:5].sum(), (0, 1))(jnp.asarray(WEIGHT), jnp.asarray(bias))
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        assert not np.asarray(gradient)[..., 1::2].any()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_second_derivatives(reduction: Any) -> None:
    """Of all arrays, in float64, against JAX's of all logits."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(3)
        arrays = tuple(jnp.asarray(rng.standard_normal(shape)) for shape in ((3, 2), (2, 4), (4,), (3,)))
        labels = jnp.array([1, -100, 3])

        def ours(hidden: Any, weight: Any, bias: Any, weights: Any) -> Any:
            options = {"bias": bias, "token_weights": weights, "reduction": reduction, "return_lse": True}
            loss, lse = fused_linear_cross_entropy(hidden, weight, labels, z_loss=0.1, logits_soft_cap=2.0, **options)
            return jnp.sin(loss).sum() + jnp.cos(lse).sum()

        def all_logits(hidden: Any, weight: Any, bias: Any, weights: Any) -> Any:
            logits = 2.0 * jnp.tanh((hidden @ weight + bias) / 2.0)
            lse, counts = jax.nn.logsumexp(logits, -1), labels != -100
            own = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], 1)[:, 0]
            losses = jnp.where(counts, weights * (lse - own + 0.1 * lse**2), 0)
            total = losses if reduction == "none" else losses.sum()
            total = total / jnp.where(counts, weights, 0).sum() if reduction == "mean" else total
            return jnp.sin(total).sum() + jnp.cos(lse).sum()

        places = (0, 1, 2, 3)
        for derivative in (jax.jacrev, jax.jacfwd):
            actual = derivative(jax.grad(ours, places), places)(*arrays)
            expected = derivative(jax.grad(all_logits, places), places)(*arrays)
            jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=1e-10), actual, expected)


# -- what is computed --------------------------------------------------------------------------------------------------


def products(function: Function, *arrays: Any) -> int:
    """The matrix products of the program that runs on this machine."""
    return len(re.findall(r"stablehlo\.dot_general", jax.jit(function).lower(*arrays).as_text()))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_only_the_gradients_that_are_used_are_computed(reduction: Any) -> None:
    def loss(hidden: Any, weight: Any) -> Any:
        return fused_linear_cross_entropy(hidden, weight, LABELS, reduction=reduction)

    arrays = jnp.asarray(HIDDEN), jnp.asarray(WEIGHT)
    assert products(loss, *arrays) == 1
    assert products(jax.value_and_grad(loss), *arrays) == 2  # a frozen head
    assert products(jax.value_and_grad(loss, (0, 1)), *arrays) == 3

    def loop(hidden: Any, weight: Any) -> Any:
        step = lambda state: (state[0] + 1, state[1] + loss(hidden, weight))
        return jax.lax.while_loop(lambda state: state[0] < 3, step, (0, 0.0))[1]

    assert products(loop, *arrays) == 1
    np.testing.assert_allclose(jax.jit(loop)(*arrays), 3 * loss(*arrays), rtol=1e-6)


def test_the_loss_of_each_row_computes_its_logits_again() -> None:
    def loss(hidden: Any, weight: Any) -> Any:
        return fused_linear_cross_entropy(hidden, weight, LABELS, reduction="none").sum()

    arrays = jnp.asarray(HIDDEN), jnp.asarray(WEIGHT)
    assert products(loss, *arrays) == 1
    assert products(jax.value_and_grad(loss), *arrays) == 3
    assert products(jax.value_and_grad(loss, (0, 1)), *arrays) == 4


def test_gradients_are_rounded_once() -> None:
    """Whatever the cotangent of the loss is: what the forward has added up in float32 is multiplied before."""
    logits, factor = RNG.standard_normal(999).astype(jnp.bfloat16), np.float32(1 / 3)
    hidden, labels = jnp.array([[1.0], [0.5]], jnp.bfloat16), jnp.array([7, 8])

    def loss(weight: Any) -> Any:
        return factor * fused_linear_cross_entropy(hidden, weight, labels, reduction="sum")

    gradient = jax.grad(loss)(jnp.asarray(logits)[None])
    rows = np.asarray(hidden, np.float64) * logits.astype(np.float64)
    p = np.exp(rows) / np.exp(rows).sum(1, keepdims=True)
    p[0, 7] -= 1
    p[1, 8] -= 1
    total = (np.asarray(hidden, np.float64) * p.astype(jnp.bfloat16).astype(np.float64)).sum(0)
    right = (factor * total.astype(np.float32)).astype(jnp.bfloat16)
    # All but where float64 rounds to another side than float32; rounded twice, a tenth would be others.
    assert (np.asarray(gradient)[0] == right).mean() > 0.99


def test_a_model_trains_as_with_all_logits() -> None:
    """200 steps of Adam on the CPU."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 50, 64)
    inputs = jnp.asarray(rng.standard_normal((64, 12)), jnp.float32)
    labels = jnp.asarray(np.where(rng.random(64) < 0.1, -100, tokens))
    first = {"inner": rng.standard_normal((12, 16)) / 4, "head": rng.standard_normal((16, 50)) / 4}

    def mean(hidden: Any, weight: Any) -> Any:
        return plain(hidden, weight, labels).sum() / (labels != -100).sum()

    ours = trained(lambda h, w: fused_linear_cross_entropy(h, w, labels), inputs, first)
    np.testing.assert_allclose(ours, trained(mean, inputs, first), rtol=1e-5)
    assert ours[-1] < 0.5 * ours[0]


def trained(loss: Function, inputs: Any, parameters: Any) -> Any:
    """The losses of 200 steps."""
    parameters = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), parameters)
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    of = lambda p: loss(jnp.tanh(inputs @ p["inner"]), p["head"])

    def step(state: Any, number: Any) -> Any:
        parameters, first, second = state
        value, gradients = jax.value_and_grad(of)(parameters)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, gradients)
        rate = 3e-3 * jnp.sqrt(1 - 0.99**number) / (1 - 0.9**number)
        moved = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-6), parameters, first, second)
        return (moved, first, second), value

    _, losses = jax.jit(lambda state: jax.lax.scan(step, state, jnp.arange(1.0, 201.0)))((parameters, zeros, zeros))
    return losses


# -- bad input ---------------------------------------------------------------------------------------------------------

ARRAYS = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"labels": LABELS.astype(np.float32)}, TypeError, "labels: takes integers; got float32"),
        ({"labels": LABELS > 0}, TypeError, "labels: takes integers; got bool"),
        ({"labels": LABELS[:5]}, ValueError, "labels"),
        ({"labels": LABELS[:, None]}, ValueError, "labels"),
        ({"weight": np.zeros((8, 0), np.float32)}, ValueError, "weight"),
        ({"weight": WEIGHT[:7]}, ValueError, "weight"),
        ({"weight": WEIGHT, "transpose_weight": True}, ValueError, "weight"),
        ({"weight": WEIGHT.astype(jnp.bfloat16)}, TypeError, "weight: takes the dtype of hidden"),
        ({"hidden": HIDDEN.astype(np.int32)}, TypeError, "hidden: takes float16"),
        ({"bias": np.zeros(19, np.float32)}, ValueError, "bias"),
        ({"bias": np.zeros(20, np.int32)}, TypeError, "bias: takes float16"),
        ({"token_weights": np.ones(5, np.float32)}, ValueError, "token_weights: takes the shape of labels"),
        ({"token_weights": np.ones(6, np.int32)}, TypeError, "token_weights: takes float16"),
        ({"label_smoothing": 1.0}, ValueError, "label_smoothing: takes a number from 0, below 1; got 1.0"),
        ({"label_smoothing": -0.1}, ValueError, "label_smoothing: takes a number from 0"),
        ({"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap: takes a number above 0"),
        ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap: takes a number above 0"),
        ({"z_loss": -1e-4}, ValueError, "z_loss: must be at least 0"),
        ({"z_loss": float("nan")}, ValueError, "z_loss: takes a finite number"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index: takes an int"),
        ({"ignore_index": 2**31}, ValueError, "ignore_index: takes a number that int32 holds"),
        ({"vocab_start": np.float32(2)}, TypeError, "vocab_start: takes integers"),
        ({"vocab_start": np.array([1, 2])}, ValueError, "vocab_start: takes one integer"),
        ({"return_lse": 1}, TypeError, "return_lse: takes True or False"),
        ({"transpose_weight": None}, TypeError, "transpose_weight: takes True or False"),
        ({"targets": LABELS}, TypeError, "'targets' is called 'labels' here"),
    ],
)
def test_bad_input_is_refused_by_name(change: Any, kind: type[Exception], words: str, reduction: Any) -> None:
    with pytest.raises(kind, match=f"^fused_linear_cross_entropy(_sum)?: .*{re.escape(words)}"):
        jax.eval_shape(lambda: fused_linear_cross_entropy(**{**ARRAYS, **change}, reduction=reduction))


@pytest.mark.parametrize("reduction", ["average", None, 1, ("sum",), np.zeros(2)])
def test_an_unknown_reduction_is_refused(reduction: Any) -> None:
    with pytest.raises(ValueError, match="reduction: takes 'mean', 'sum' or 'none'; got"):
        fused_linear_cross_entropy(**ARRAYS, reduction=reduction)


def test_the_operation_of_the_sum_refuses_an_unknown_reduction() -> None:
    for reduction in ("none", None, 1):
        with pytest.raises(ValueError, match="reduction: takes 'mean' or 'sum'; got"):
            ejkernel_core.call("fused_linear_cross_entropy_sum", **ARRAYS, reduction=reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_labels_are_checked_by_value(reduction: Any) -> None:
    options: dict[str, Any] = {"reduction": reduction, "validate": True}
    fused_linear_cross_entropy(**ARRAYS, **options)
    for label in (20, -1, -99):
        labels = np.array([3, 1, label, 0, 7, -100])
        with pytest.raises(
            ValueError, match=rf"labels\[2\] must be from 0 to 19, or -100, which is ignored; got {label}"
        ):
            fused_linear_cross_entropy(HIDDEN, WEIGHT, labels, **options)
    with pytest.raises(ValueError, match="got -100"):
        fused_linear_cross_entropy(**ARRAYS, ignore_index=-1, **options)
    # A shard of the vocabulary gets labels of others too.
    fused_linear_cross_entropy(HIDDEN, WEIGHT, np.array([3, 1, 70, 0, 7, -100]), vocab_start=4, **options)
    with pytest.raises(ValueError, match="must be at least 0"):
        fused_linear_cross_entropy(HIDDEN, WEIGHT, np.array([3, 1, -7, 0, 7, -100]), vocab_start=4, **options)
    with pytest.raises(ValueError, match="vocab_start must be at least 0; got -4"):
        fused_linear_cross_entropy(**ARRAYS, vocab_start=-4, **options)
