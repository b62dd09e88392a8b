"""Gradients rounded to another dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def identity_dtype_convert(dtype: Any) -> Callable[[Any], Any]:
    """The identity, for arrays or trees of them, whose gradient is rounded to ``dtype`` on its way back.

    JAX wants a gradient in the dtype of what it is the gradient of, so it is cast to ``dtype`` and back: it has the
    numbers of ``dtype``, in the primal's dtype. A ``dtype`` at least as wide as the primal's changes nothing.

    >>> rounded = identity_dtype_convert(jnp.bfloat16)
    >>> jax.grad(lambda x: 1.001 * rounded(x))(jnp.float32(2.0))
    Array(1., dtype=float32)
    >>> rounded(jnp.float32(1.001))
    Array(1.001, dtype=float32)

    The gradient of integers is none; complex numbers are a ``TypeError``. The same dtype gives the same function.
    """
    if not jnp.issubdtype(kind := np.dtype(dtype), jnp.floating):
        raise TypeError(f"dtype: takes a floating dtype; got {kind}")
    return _identity(kind)


@functools.cache
def _identity(dtype: np.dtype[Any]) -> Callable[[Any], Any]:
    @jax.custom_vjp
    def identity(x: Any) -> Any:
        return x

    def forward(x: Any) -> tuple[Any, None]:
        if any(jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(x)):
            raise TypeError("identity_dtype_convert: takes real numbers; got complex ones")
        return x, None

    def backward(_: None, gradient: Any) -> tuple[Any]:
        return (jax.tree.map(lambda g: _rounded(g, dtype), gradient),)

    identity.defvjp(forward, backward)
    return identity


def _rounded(gradient: Any, dtype: np.dtype[Any]) -> Any:
    """Without the barrier XLA may leave out a cast there and back, and keep the digits."""
    if gradient.dtype == jax.dtypes.float0 or jnp.promote_types(gradient.dtype, dtype) == dtype:
        return gradient
    return jax.lax.optimization_barrier(gradient.astype(dtype)).astype(gradient.dtype)
