"""``assert_allclose`` in every dtype against ``np.allclose`` in float64, and its messages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from ejkernel_testing import assert_allclose

FLOATS = [
    np.float16, ml_dtypes.bfloat16, np.float32, np.float64, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
]  # fmt: skip
INTEGERS = [np.int8, np.uint8, np.int32, np.int64, np.uint64, ml_dtypes.int4]
SHAPES = st.sampled_from([(), (0,), (4,), (2, 0, 3), (2, 3)])
SPECIAL = [0.0, -0.0, 1.0, -2.0, 1.00001, np.nan, np.inf, -np.inf]


def is_accepted(actual: Any, expected: Any, **options: Any) -> bool:
    try:
        assert_allclose(actual, expected, **options)
    except AssertionError:
        return False
    return True


@given(
    st.data(),
    SHAPES,
    st.sampled_from(FLOATS),
    st.booleans(),
    st.sampled_from([(1e-5, 1e-8), (0.1, 0.0), (0.0, 0.5), (0.0, 0.0)]),
)
def test_floats(data: Any, shape: Any, dtype: Any, equal_nan: bool, tolerances: Any) -> None:
    numbers = npst.arrays(np.float64, shape, elements=st.sampled_from(SPECIAL))
    one = data.draw(numbers).astype(dtype)
    other = np.where(data.draw(npst.arrays(bool, shape)), one, data.draw(numbers).astype(dtype)).astype(dtype)
    rtol, atol = tolerances
    wide = one.astype(np.float64), other.astype(np.float64)
    is_close = np.allclose(*wide, rtol=rtol, atol=atol, equal_nan=equal_nan)
    for pair in ((one, other), (jnp.asarray(one), other)):
        if dtype != np.float64 or pair[0] is one:  # without x64, JAX has no float64
            assert is_accepted(*pair, rtol=rtol, atol=atol, equal_nan=equal_nan) is is_close


@given(st.data(), st.sampled_from(INTEGERS), st.sampled_from([0.0, 1.0, 3.0]))
def test_integers(data: Any, dtype: Any, atol: float) -> None:
    lowest, highest = int(ml_dtypes.iinfo(dtype).min), int(ml_dtypes.iinfo(dtype).max)
    elements = st.one_of(st.integers(lowest, min(highest, lowest + 4)), st.integers(max(lowest, highest - 4), highest))
    one, other = (data.draw(st.lists(elements, min_size=3, max_size=3)) for _ in range(2))
    is_close = all(abs(a - b) <= atol for a, b in zip(one, other, strict=True))
    assert is_accepted(np.array(one, dtype), np.array(other, dtype), rtol=0.0, atol=atol) is is_close


def test_neighbouring_large_integers_differ() -> None:
    assert not is_accepted(np.array([2**62]), np.array([2**62 + 1]), rtol=0.0, atol=0.0)
    assert is_accepted(np.array([2**62]), np.array([2**62 + 1]), rtol=0.0, atol=1.0)
    assert not is_accepted(np.array([-(2**63)]), np.array([2**63 - 1]))
    assert not is_accepted(np.array([-1]), np.array([2**64 - 1], np.uint64), check_dtype=False)


def test_booleans_have_no_tolerance() -> None:
    assert is_accepted(jnp.array([True, False]), np.array([True, False]))
    assert not is_accepted(np.array([True, False]), np.array([True, True]), atol=5.0, rtol=5.0)


PARTS = st.sampled_from([0.0, 1.0, np.nan, np.inf, -np.inf])


@given(PARTS, PARTS, PARTS, PARTS, st.booleans())
@example(1.0, np.nan, 0.0, np.nan, True)
def test_infinities_and_nan_in_parts_of_complex_numbers(
    a: float, b: float, c: float, d: float, equal_nan: bool
) -> None:
    is_close = all(np.allclose(x, y, equal_nan=equal_nan) for x, y in ((a, c), (b, d)))
    assert is_accepted(np.complex64(complex(a, b)), np.complex64(complex(c, d)), equal_nan=equal_nan) is is_close


def test_finite_complex_numbers_are_compared_by_distance() -> None:
    assert is_accepted(np.array(3 + 4j), np.array(3 + 4.4j), rtol=0.1, atol=0.0)
    assert not is_accepted(np.array(0 + 4j), np.array(0.3 + 4j), rtol=0.01, atol=0.0)


def test_narrow_dtypes_are_not_compared_in_their_own_arithmetic() -> None:
    """In float8, the tolerance would be rounded to 16, the distance of the two; in float16, both would be infinite."""
    one, other = np.array([240.0], ml_dtypes.float8_e4m3fn), np.array([256.0], ml_dtypes.float8_e4m3fn)
    assert not is_accepted(one, other, rtol=0.0615, atol=0.0)
    assert is_accepted(one, other, rtol=0.0625, atol=0.0)
    assert not is_accepted(np.array([448.0], one.dtype), np.array([-448.0], one.dtype))
    extremes = np.array([60000.0], np.float16), np.array([-60000.0], np.float16)
    assert is_accepted(*extremes, atol=120000.0)
    assert not is_accepted(*extremes, atol=119000.0, rtol=0.0)


MISMATCHES = {
    "shape": (np.zeros((2, 3)), np.zeros((3, 2)), r"the shape is \(2, 3\), expected \(3, 2\)"),
    "no broadcasting": (np.zeros(3), np.zeros(()), r"the shape is \(3,\), expected \(\)"),
    "empty shapes": (np.zeros((0, 2)), np.zeros((0, 3)), "the shape is"),
    "dtype": (jnp.zeros(2), jnp.zeros(2, jnp.bfloat16), "the dtype is float32, expected bfloat16"),
    "dtype of empty arrays": (jnp.zeros(0), jnp.zeros(0, int), "the dtype is float32, expected int32"),
    "one value": (
        jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[1.0, 2.0], [3.0, 5.0]]),
        r"1 of 4 values are off by more than rtol=1e-05, atol=1e-08; the worst is \[1, 1\]: 4.0, expected 5.0",
    ),
    "the worst": (np.array([1, 2, 9]), np.array([2, 9, 8]), r"3 of 3 .* the worst is \[1\]: 2, expected 9"),
    "NaN is the worst": (np.array([0.0, np.nan]), np.array([9.0, 0.0]), r"2 of 2 .* \[1\]: nan, expected 0.0"),
    "infinity is the worst": (np.array([0.0, 1.0]), np.array([9.0, -np.inf]), r"2 of 2 .* \[1\]: 1.0, expected -inf"),
    "no axes": (np.float32(1), np.float32(2), r"1 of 1 values .* the worst is \[\]: 1.0, expected 2.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISMATCHES)
def test_messages(name: str) -> None:
    actual, expected, message = MISMATCHES[name]
    with pytest.raises(AssertionError, match=f"assert_allclose: {message}"):
        assert_allclose(actual, expected)


def test_dtypes_may_differ_with_check_dtype_false_or_without_a_dtype() -> None:
    assert_allclose(jnp.ones(2), np.ones(2, np.int8), check_dtype=False)
    assert_allclose(jnp.ones(2, jnp.bfloat16), [1, 1])
    assert_allclose(1.0, jnp.float32(1))
    with pytest.raises(AssertionError, match="values are off"):
        assert_allclose(jnp.ones(2), np.zeros(2, np.int8), check_dtype=False)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: assert_allclose(np.ones(1), np.ones(1), rtol=-1), ValueError, "rtol: must be at least 0"),
        (lambda: assert_allclose(np.ones(1), np.ones(1), atol=np.nan), ValueError, "atol: must be at least 0"),
        (lambda: assert_allclose(np.array(["a"]), np.ones(1)), TypeError, "actual: takes numbers"),
        (lambda: assert_allclose(np.ones(1), None), TypeError, "expected: takes numbers"),
        (lambda: jax.jit(lambda x: assert_allclose(x, x))(1.0), jax.errors.TracerArrayConversionError, "traced"),
    ],
)
def test_wrong_arguments(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
