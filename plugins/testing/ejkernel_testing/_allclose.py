"""Comparison of two arrays value by value, in every dtype that JAX has."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

Array = np.ndarray[Any, Any]


def assert_allclose(
    actual: Any,
    expected: Any,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = True,
    check_dtype: bool = True,
) -> None:
    """Raise AssertionError unless both have the same shape, dtype and values, within ``atol + rtol * abs(expected)``.

    The message has the number of values that are too far off, and the index and both values of the worst. Nothing is
    broadcast. Values without a dtype, such as a list or a Python number, match every dtype; with ``check_dtype=False``
    dtypes may differ. Values are compared in float64, integers exactly, and booleans for equality. An infinity equals
    itself, and so does NaN, unless ``equal_nan=False``; of complex numbers, each part does.

    >>> assert_allclose(jnp.array([1.0, 2.0]), jnp.array([1.0, 2.000001]))
    >>> try:
    ...     assert_allclose(jnp.array([1.0, 2.5, 3.0]), jnp.array([1.0, 2.0, 4.0]))
    ... except AssertionError as error:
    ...     print(error)
    assert_allclose: 2 of 3 values are off by more than rtol=1e-05, atol=1e-08; the worst is [2]: 3.0, expected 4.0
    """
    for name, tolerance in {"rtol": rtol, "atol": atol}.items():
        if not tolerance >= 0:
            raise ValueError(f"{name}: must be at least 0; got {tolerance}")
    have_dtypes = hasattr(actual, "dtype") and hasattr(expected, "dtype")
    actual, expected = _numeric(actual, "actual"), _numeric(expected, "expected")
    if actual.shape != expected.shape:
        raise AssertionError(f"assert_allclose: the shape is {actual.shape}, expected {expected.shape}")
    if check_dtype and have_dtypes and actual.dtype != expected.dtype:
        raise AssertionError(f"assert_allclose: the dtype is {actual.dtype}, expected {expected.dtype}")
    is_wrong = ~_is_close(actual, expected, rtol, atol, equal_nan)
    if not is_wrong.any():
        return
    indices = np.argwhere(is_wrong)
    worst = tuple(int(i) for i in indices[np.argmax(_distances(actual[is_wrong], expected[is_wrong]))])
    raise AssertionError(
        f"assert_allclose: {len(indices)} of {actual.size} values are off by more than rtol={rtol}, atol={atol}; "
        f"the worst is {list(worst)}: {actual[worst]}, expected {expected[worst]}"
    )


def _numeric(value: Any, name: str) -> Array:
    array = np.asarray(value)
    if not (array.dtype == np.bool_ or jnp.issubdtype(array.dtype, jnp.number)):
        raise TypeError(f"{name}: takes numbers; got {array.dtype}")
    return array


def _is_close(actual: Array, expected: Array, rtol: float, atol: float, equal_nan: bool) -> Array:
    if np.bool_ in (actual.dtype, expected.dtype):
        return np.asarray(actual == expected)
    if _is_integral(actual, expected):
        is_close = np.asarray(actual == expected)
        # In Python, where a difference of two int64 does not overflow.
        pairs = zip(actual[~is_close].tolist(), expected[~is_close].tolist(), strict=True)
        is_close[~is_close] = [abs(a - b) <= atol + rtol * abs(b) for a, b in pairs]
        return is_close
    actual, expected = _float64(actual), _float64(expected)
    if np.iscomplexobj(actual) or np.iscomplexobj(expected):
        is_near = _is_near(actual, expected, rtol, atol)
        parts = ((actual.real, expected.real), (actual.imag, expected.imag))
        real, imag = (_is_close(a, b, rtol, atol, equal_nan) for a, b in parts)
        return np.where(np.isfinite(actual) & np.isfinite(expected), is_near, real & imag)
    is_equal = (actual == expected) | (np.isnan(actual) & np.isnan(expected) & equal_nan)
    return np.asarray(is_equal | _is_near(actual, expected, rtol, atol))


def _is_near(actual: Array, expected: Array, rtol: float, atol: float) -> Array:
    """Whether both values are finite and within the tolerances."""
    is_finite = np.isfinite(actual) & np.isfinite(expected)
    with np.errstate(all="ignore"):
        return np.asarray(is_finite & (np.abs(actual - expected) <= atol + rtol * np.abs(expected)))


def _distances(actual: Array, expected: Array) -> list[float]:
    """The absolute differences; infinity where a value is NaN or infinite."""
    if _is_integral(actual, expected):
        return [abs(a - b) for a, b in zip(actual.tolist(), expected.tolist(), strict=True)]
    with np.errstate(all="ignore"):
        distances = np.abs(_float64(actual) - _float64(expected))
    return [float(d) for d in np.where(np.isnan(distances), np.inf, distances)]


def _is_integral(*arrays: Array) -> bool:
    return all(array.dtype == np.bool_ or jnp.issubdtype(array.dtype, jnp.integer) for array in arrays)


def _float64(array: Array) -> Array:
    """The same numbers in double precision, real or complex."""
    return array.astype(np.complex128 if jnp.issubdtype(array.dtype, jnp.complexfloating) else np.float64)
