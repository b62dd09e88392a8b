"""``log_sum_exp`` and ``safe_divide`` against NumPy in float64, and gradients where the plain formula gives NaN."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ejkernel_ops.numerics import log_sum_exp, safe_divide

#: Few shapes, because each of them compiles.
QUICK = settings(max_examples=25, derandomize=True)
DTYPES = [np.float16, jnp.bfloat16, np.float32, np.float64]
SHAPE = (2, 3, 2)
AXES = [None, 0, -1, (0, 2), (-2, -3), (0, 1, 2), ()]
NUMBERS = st.sampled_from([0.0, 1.0, -3.0, 1e4, -1e4, 1e4 - 1, math.inf, -math.inf, -math.inf, math.nan])
ARRAYS = st.lists(NUMBERS, min_size=12, max_size=12).map(lambda numbers: np.array(numbers).reshape(SHAPE))

jitted_log_sum_exp = jax.jit(log_sum_exp, static_argnames=("axis", "keepdims"))
jitted_safe_divide = jax.jit(safe_divide, static_argnames="min_denominator")


def by_numpy(x, axis, keepdims):
    with np.errstate(all="ignore"):
        axis = tuple(range(x.ndim)) if axis is None else axis
        return (
            np.logaddexp.reduce(x, axis=axis, keepdims=keepdims)
            if not isinstance(axis, tuple)
            else over_axes(x, axis, keepdims)
        )


def over_axes(x, axes, keepdims):
    for axis in axes:
        x = np.logaddexp.reduce(x, axis=axis, keepdims=True)
    return x if keepdims else np.squeeze(x, axes)


def close(result, expected, dtype):
    assert result.dtype == dtype
    assert result.shape == expected.shape
    np.testing.assert_allclose(
        np.asarray(result, np.float64), expected.astype(dtype).astype(np.float64), rtol=4 * float(jnp.finfo(dtype).eps)
    )


@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
def test_log_sum_exp(axis, keepdims):
    @QUICK
    @given(ARRAYS, st.sampled_from([jnp.bfloat16, np.float64] if axis == -1 else [np.float32]))
    @example(np.full(SHAPE, -math.inf), np.float32)
    @example(np.full(SHAPE, math.inf), np.float32)
    def check(x, dtype):
        with jax.enable_x64(dtype == np.float64):
            x = x.astype(dtype)
            expected = by_numpy(x.astype(np.float64), axis, keepdims)
            close(log_sum_exp(x, axis, keepdims), expected, dtype)
            close(jitted_log_sum_exp(x, axis=axis, keepdims=keepdims), expected, dtype)

    check()


@QUICK
@given(ARRAYS)
@example(np.full(SHAPE, -math.inf))
@example(np.full(SHAPE, math.inf))
@example(np.full(SHAPE, 1e4))
@example(np.where(np.arange(12).reshape(SHAPE) % 2, math.inf, -math.inf))
def test_the_gradient_is_finite_and_a_softmax(x):
    x = np.nan_to_num(x, nan=2.0, posinf=math.inf, neginf=-math.inf).astype(np.float32)
    with np.errstate(all="ignore"):
        row_max = x.max(-1, keepdims=True)
        weights = np.where(np.isinf(row_max), x == row_max, np.exp(x - row_max)) * (row_max != -math.inf)
        expected = weights / np.maximum(weights.sum(-1, keepdims=True), 1)
    gradient = gradients_of_sum()(x)
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-30)


@functools.cache
def gradients_of_sum():
    return jax.jit(jax.grad(lambda x: log_sum_exp(x, axis=-1).sum()))


def test_nan_affects_its_row_only():
    x = jnp.array([[1.0, jnp.nan], [2.0, 2.0]])
    gradient = jax.grad(lambda x: log_sum_exp(x, axis=1).sum())(x)
    assert np.isnan(gradient[0]).any()
    np.testing.assert_allclose(gradient[1], [0.5, 0.5])


@pytest.mark.long
def test_second_derivatives_and_forward_mode():
    x = jnp.array([1e4, 1e4 - 1, -jnp.inf])
    weights = np.exp([0, -1, -np.inf]) / (1 + np.exp(-1))
    expected = np.diag(weights) - np.outer(weights, weights)
    np.testing.assert_allclose(jax.hessian(log_sum_exp)(x), expected, atol=1e-6)
    np.testing.assert_allclose(jax.jacfwd(log_sum_exp)(x), weights, rtol=1e-5)
    for extreme in (-jnp.inf, jnp.inf):
        assert np.isfinite(jax.hessian(log_sum_exp)(jnp.full(3, extreme))).all()


def test_the_example_of_the_document():
    """The document says 1002.407; without an axis its code gives an array of shape (1,), here it is a scalar."""
    result = log_sum_exp(jnp.array([1000.0, 1001.0, 1002.0]))
    assert result.shape == ()
    assert abs(float(result) - 1002.4076) < 1e-3


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint32, bool])
@pytest.mark.parametrize("x64", [False, True])
def test_integers_become_floats(dtype, x64):
    with jax.enable_x64(x64):
        x = jnp.array([[1, 0], [1, 1]], dtype)
        result = jitted_log_sum_exp(x, axis=1)
        assert result.dtype == jnp.exp(x).dtype
        np.testing.assert_allclose(result, np.log(np.exp(np.asarray(x, float)).sum(1)), rtol=1e-6)
        assert jitted_safe_divide(x, x).dtype == jnp.exp(x).dtype


def test_long_sums_in_low_precision_are_rounded_once():
    x = jnp.zeros(5000, jnp.bfloat16)
    assert jitted_log_sum_exp(x) == jnp.asarray(math.log(5000), jnp.bfloat16)
    assert jitted_log_sum_exp(x.astype(jnp.float16)) == jnp.asarray(math.log(5000), jnp.float16)
    assert jitted_log_sum_exp(x.astype(jnp.float8_e4m3fn)) == jnp.asarray(math.log(5000), jnp.float8_e4m3fn)


def test_sums_without_numbers():
    assert jitted_log_sum_exp(jnp.zeros(0)) == -jnp.inf
    assert jitted_log_sum_exp(jnp.zeros((0, 2)), axis=0).tolist() == [-jnp.inf] * 2
    assert jitted_log_sum_exp(jnp.zeros((0, 2)), axis=1).shape == (0,)
    assert jitted_log_sum_exp(3.0) == 3.0
    assert jax.jit(jax.grad(lambda x: log_sum_exp(x, axis=0).sum()))(jnp.zeros((0, 2))).shape == (0, 2)


@pytest.mark.long
def test_log_sum_exp_under_vmap_and_checkpoint():
    x = jax.random.normal(jax.random.key(0), (4, 3))
    np.testing.assert_allclose(jax.vmap(log_sum_exp)(x), log_sum_exp(x, axis=1), rtol=1e-6)
    loss = lambda x: log_sum_exp(x, axis=0).sum()
    np.testing.assert_allclose(jax.grad(jax.checkpoint(loss))(x), jax.nn.softmax(x, axis=0), rtol=1e-5)


# -- division -----------------------------------------------------------------------------------------------------

NUMERATORS = st.sampled_from([0.0, 1.0, -2.5, 1e4, math.inf, math.nan])
DENOMINATORS = st.sampled_from(
    [0.0, -0.0, 1e-30, -1e-30, 1e-12, -1e-12, 0.25, -0.25, 3.0, -4.0, math.inf, -math.inf, math.nan]
)


@QUICK
@given(NUMERATORS, DENOMINATORS, st.sampled_from(DTYPES), st.sampled_from([1e-10, 0.5]))
@example(1.0, -1e-12, np.float32, 1e-10)
@example(1.0, -0.0, np.float32, 1e-10)
@example(1.0, 0.0, np.float16, 1e-10)
@example(1.0, 0.25, np.float64, 0.25)
def test_safe_divide(numerator, denominator, dtype, minimum):
    with jax.enable_x64(dtype == np.float64):
        a, b = np.array([numerator], dtype), np.array([denominator], dtype)
        floor = max(np.array(minimum).astype(dtype).astype(float), float(jnp.finfo(dtype).tiny))
        bottom = b.astype(float)
        bottom = np.where(np.abs(bottom) < floor, np.where(bottom < 0, -floor, floor), bottom)
        with np.errstate(all="ignore"):
            expected = a.astype(float) / bottom
            for result in (safe_divide(a, b, minimum), jitted_safe_divide(a, b, min_denominator=minimum)):
                close(result, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_around_0(dtype):
    with jax.enable_x64(dtype == np.float64):
        numerator = jnp.ones(7, dtype)
        denominator = jnp.array([0.0, -0.0, 1e-20, -1e-20, 0.25, -0.25, 2.0], dtype)
        d_numerator, d_denominator = jax.jit(jax.grad(lambda a, b: safe_divide(a, b).sum(), argnums=(0, 1)))(
            numerator, denominator
        )
        assert d_numerator.dtype == d_denominator.dtype == dtype
        assert np.isfinite(d_denominator.astype(float)).all()
        assert d_denominator.astype(float).tolist() == [0, 0, 0, 0, -16, -16, -0.25]
        floor = max(1e-10, float(jnp.finfo(dtype).tiny))
        negative = floor if dtype == np.float16 else -floor  # in float16, -1e-20 is -0.0
        np.testing.assert_allclose(
            d_numerator.astype(float), 1 / np.array([floor, floor, floor, negative, 0.25, -0.25, 2.0]), rtol=1e-2
        )
        assert np.isfinite(d_numerator.astype(float)).all()


def test_safe_divide_broadcasts_and_promotes():
    result = safe_divide(jnp.ones((2, 1), jnp.bfloat16), jnp.array([2.0, -4.0], jnp.float32))
    assert result.dtype == jnp.float32
    assert result.tolist() == [[0.5, -0.25]] * 2
    assert safe_divide(1, 4) == 0.25
    assert safe_divide(jnp.ones(0), 2.0).shape == (0,)
    assert safe_divide(jnp.ones(2, jnp.bfloat16), 2.0).dtype == jnp.bfloat16  # a number of Python has no dtype


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: log_sum_exp(jnp.array(1j)), TypeError, "x: takes real numbers; got complex64"),
        (lambda: log_sum_exp(jnp.ones(3), axis=1), ValueError, "axis 1 is out of bounds"),
        (lambda: safe_divide(1j, 2.0), TypeError, "numerator: takes real numbers"),
        (lambda: safe_divide(1.0, 2j), TypeError, "denominator: takes real numbers"),
        (lambda: safe_divide(1.0, 2.0, 0.0), ValueError, "min_denominator: takes a number above 0; got 0.0"),
        (lambda: safe_divide(1.0, 2.0, -1.0), ValueError, "min_denominator: takes a number above 0"),
        (lambda: safe_divide(1.0, 2.0, math.inf), ValueError, "min_denominator: takes a number above 0"),
        (lambda: safe_divide(1.0, 2.0, math.nan), ValueError, "min_denominator: takes a number above 0"),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()
