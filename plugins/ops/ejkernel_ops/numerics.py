"""Arithmetic that stays finite, and so do its gradients."""

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

    Of nothing, or of -inf alone, it is -inf, and the gradient is 0. With a +inf it is that, and the gradient is shared
    by all of them. NaN stays NaN. Integers become floats, as in ``jnp.exp``; float16 and what is narrower is added up
    in float32 and rounded once. Derivatives of every order are finite wherever nothing is NaN.
    """
    x = _floats(x, "x")
    dtype = x.dtype
    x = x.astype(dtype if jnp.finfo(dtype).bits > 32 else jnp.float32)
    peak = jnp.max(x, axis=axis, keepdims=True, initial=-jnp.inf)
    bounded = jnp.isfinite(peak)
    shift = jax.lax.stop_gradient(jnp.where(bounded, peak, 0))
    # What is left out must neither reach exp nor send a gradient back, not even 0 * inf.
    seen = bounded & (x != -jnp.inf)
    exponentials = jnp.where(seen, jnp.exp(jnp.where(seen, x - shift, 0)), 0)
    total = jnp.sum(exponentials, axis=axis, keepdims=True)
    infinite = jnp.where(peak == -jnp.inf, -jnp.inf, peak)
    result = jnp.where(bounded, jnp.log(jnp.where(bounded, total, 1)) + shift, infinite).astype(dtype)
    return result if keepdims else jnp.squeeze(result, axis)


def safe_divide(numerator: ArrayLike, denominator: ArrayLike, min_denominator: float = 1e-10) -> jax.Array:
    """``numerator / denominator``, with a denominator closer to 0 than ``min_denominator`` moved away to it.

    >>> safe_divide(jnp.array([1.0, 1.0, -1.0]), jnp.array([4.0, 0.0, -1e-20]), min_denominator=0.5)
    Array([0.25, 2.  , 2.  ], dtype=float32)

    The sign is kept; 0 and -0.0, which are equal, both count as positive. ``min_denominator`` is at least the smallest
    normal number of the dtype, of which 1e-10 in float16 would be 0. Where the denominator was moved its gradient is
    0. NaN stays NaN. Integers become floats.
    """
    if not 0 < min_denominator < math.inf:
        raise ValueError(f"min_denominator: takes a number above 0; got {min_denominator}")
    above, below = _floats(numerator, "numerator"), _floats(denominator, "denominator")
    dtype = jnp.result_type(above, below)
    above, below = above.astype(dtype), below.astype(dtype)
    least = jnp.asarray(max(float(min_denominator), float(jnp.finfo(dtype).tiny)), dtype)
    moved = jnp.where(below < 0, -least, least)
    return above / jnp.where(jnp.abs(below) < least, moved, below)


def _floats(given: ArrayLike, name: str) -> jax.Array:
    array: Any = jnp.asarray(given)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{name}: takes real numbers; got {array.dtype}")
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array  # type: ignore[no-any-return]
    return array.astype(jax.eval_shape(jnp.exp, array).dtype)  # type: ignore[no-any-return]
