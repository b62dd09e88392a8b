"""Two arrays compared value by value, in every dtype that JAX has."""

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
    """Raise AssertionError unless both have one shape, one dtype, and values within ``atol + rtol * abs(expected)``.

    The message tells how many values are too far off, and of the worst its place and both values. Nothing is
    broadcast. What has no dtype of its own, as a list or a number of Python, has every dtype; ``check_dtype=False``
    lets any two pass. Values are compared in float64, integers exactly, and booleans are equal or not. Infinities are
    equal to themselves, and so is NaN, unless ``equal_nan=False``; of a complex number, each part.

    >>> assert_allclose(jnp.array([1.0, 2.0]), jnp.array([1.0, 2.000001]))
    >>> try:
    ...     assert_allclose(jnp.array([1.0, 2.5, 3.0]), jnp.array([1.0, 2.0, 4.0]))
    ... except AssertionError as error:
    ...     print(error)
    assert_allclose: 2 of 3 values are off by more than rtol=1e-05, atol=1e-08; the worst is [2]: 3.0, expected 4.0
    """
    for name, tolerance in {"rtol": rtol, "atol": atol}.items():
        if not tolerance >= 0:
            raise ValueError(f"{name}: is at least 0; got {tolerance}")
    typed = hasattr(actual, "dtype") and hasattr(expected, "dtype")
    own, wanted = _numbers(actual, "actual"), _numbers(expected, "expected")
    if own.shape != wanted.shape:
        raise AssertionError(f"assert_allclose: the shape is {own.shape}, expected {wanted.shape}")
    if check_dtype and typed and own.dtype != wanted.dtype:
        raise AssertionError(f"assert_allclose: the dtype is {own.dtype}, expected {wanted.dtype}")
    wrong = ~_close(own, wanted, rtol, atol, equal_nan)
    if not wrong.any():
        return
    places = np.argwhere(wrong)
    worst = tuple(int(i) for i in places[np.argmax(_distances(own[wrong], wanted[wrong]))])
    raise AssertionError(
        f"assert_allclose: {len(places)} of {own.size} values are off by more than rtol={rtol}, atol={atol}; "
        f"the worst is {list(worst)}: {own[worst]}, expected {wanted[worst]}"
    )


def _numbers(given: Any, name: str) -> Array:
    array = np.asarray(given)
    if not (array.dtype == np.bool_ or jnp.issubdtype(array.dtype, jnp.number)):
        raise TypeError(f"{name}: takes numbers; got {array.dtype}")
    return array


def _close(own: Array, wanted: Array, rtol: float, atol: float, equal_nan: bool) -> Array:
    if np.bool_ in (own.dtype, wanted.dtype):
        return np.asarray(own == wanted)
    if _are_whole(own, wanted):
        close = np.asarray(own == wanted)
        # In Python, where a difference of two int64 does not overflow.
        pairs = zip(own[~close].tolist(), wanted[~close].tolist(), strict=True)
        close[~close] = [abs(a - b) <= atol + rtol * abs(b) for a, b in pairs]
        return close
    own, wanted = _wide(own), _wide(wanted)
    if np.iscomplexobj(own) or np.iscomplexobj(wanted):
        near = _are_near(own, wanted, rtol, atol)
        each = [_close(a, b, rtol, atol, equal_nan) for a, b in ((own.real, wanted.real), (own.imag, wanted.imag))]
        return np.where(np.isfinite(own) & np.isfinite(wanted), near, each[0] & each[1])
    same = (own == wanted) | (np.isnan(own) & np.isnan(wanted) & equal_nan)
    return np.asarray(same | _are_near(own, wanted, rtol, atol))


def _are_near(own: Array, wanted: Array, rtol: float, atol: float) -> Array:
    """Of what is finite on both sides."""
    finite = np.isfinite(own) & np.isfinite(wanted)
    with np.errstate(all="ignore"):
        return np.asarray(finite & (np.abs(own - wanted) <= atol + rtol * np.abs(wanted)))


def _distances(own: Array, wanted: Array) -> list[float]:
    """How far apart they are; where one is NaN or infinite, infinitely far."""
    if _are_whole(own, wanted):
        return [abs(a - b) for a, b in zip(own.tolist(), wanted.tolist(), strict=True)]
    with np.errstate(all="ignore"):
        apart = np.abs(_wide(own) - _wide(wanted))
    return [float(d) for d in np.where(np.isnan(apart), np.inf, apart)]


def _are_whole(*arrays: Array) -> bool:
    return all(array.dtype == np.bool_ or jnp.issubdtype(array.dtype, jnp.integer) for array in arrays)


def _wide(array: Array) -> Array:
    return array.astype(np.complex128 if jnp.issubdtype(array.dtype, jnp.complexfloating) else np.float64)
