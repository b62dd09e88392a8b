"""Arithmetic whose results and gradients stay finite."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

__all__ = ["log_sum_exp", "safe_divide"]


def log_sum_exp(x: ArrayLike, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> jax.Array:
    """``log(sum(exp(x)))`` over one axis, several, or all, without overflow.

    >>> log_sum_exp(jnp.array([1000.0, 1001.0, 1002.0]))
    Array(1002.4076, dtype=float32)
    >>> log_sum_exp(jnp.array([[0.0, -jnp.inf], [-jnp.inf, -jnp.inf]]), axis=-1)
    Array([  0., -inf], dtype=float32)

    Of no numbers, or of -inf only, it is -inf, and the gradient is 0. With a +inf it is +inf, and all +inf get the same
    gradient. NaN stays NaN. Integers become floats, as in ``jnp.exp``; float16 and narrower dtypes are summed in
    float32 and rounded once. Derivatives of every order are finite unless there is a NaN.
    """
    x = _as_floats(x, "x")
    dtype = x.dtype
    x = x.astype(dtype if jnp.finfo(dtype).bits > 32 else jnp.float32)
    peak = jnp.max(x, axis=axis, keepdims=True, initial=-jnp.inf)
    is_finite = jnp.isfinite(peak)
    shift = jax.lax.stop_gradient(jnp.where(is_finite, peak, 0))
    # With two ``where``s, masked numbers neither reach exp nor get a gradient, not even 0 * inf.
    is_counted = is_finite & (x != -jnp.inf)
    exponentials = jnp.where(is_counted, jnp.exp(jnp.where(is_counted, x - shift, 0)), 0)
    total = jnp.sum(exponentials, axis=axis, keepdims=True)
    limit = jnp.where(peak == -jnp.inf, -jnp.inf, peak)
    result = jnp.where(is_finite, jnp.log(jnp.where(is_finite, total, 1)) + shift, limit).astype(dtype)
    return result if keepdims else jnp.squeeze(result, axis)


def safe_divide(numerator: ArrayLike, denominator: ArrayLike, min_denominator: float = 1e-10) -> jax.Array:
    """``numerator / denominator``, with denominators no closer to 0 than ``min_denominator``.

    >>> safe_divide(jnp.array([1.0, 1.0, -1.0]), jnp.array([4.0, 0.0, -1e-20]), min_denominator=0.5)
    Array([0.25, 2.  , 2.  ], dtype=float32)

    A denominator that is replaced keeps its sign, and its gradient is 0; 0 and -0.0, which are equal, both count as
    positive. ``min_denominator`` is at least the smallest normal number of the dtype, because in float16 1e-10 is 0.
    NaN stays NaN. Integers become floats.
    """
    if not 0 < min_denominator < math.inf:
        raise ValueError(f"min_denominator: takes a number above 0; got {min_denominator}")
    dividend, divisor = _as_floats(numerator, "numerator"), _as_floats(denominator, "denominator")
    dtype = jnp.result_type(dividend, divisor)
    dividend, divisor = dividend.astype(dtype), divisor.astype(dtype)
    smallest = jnp.asarray(max(float(min_denominator), float(jnp.finfo(dtype).tiny)), dtype)
    replacement = jnp.where(divisor < 0, -smallest, smallest)
    return dividend / jnp.where(jnp.abs(divisor) < smallest, replacement, divisor)


def _as_floats(x: ArrayLike, name: str) -> jax.Array:
    array: Any = jnp.asarray(x)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{name}: takes real numbers; got {array.dtype}")
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array  # type: ignore[no-any-return]
    return array.astype(jax.eval_shape(jnp.exp, array).dtype)  # type: ignore[no-any-return]
