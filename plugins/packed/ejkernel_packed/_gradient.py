"""Round gradients to another dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def identity_dtype_convert(dtype: Any) -> Callable[[Any], Any]:
    """An identity function for arrays and trees of arrays that rounds their gradients to ``dtype``.

    JAX requires a gradient to have the dtype of its primal, so it is cast to ``dtype`` and back: its values are
    rounded, and its dtype is the primal's. A ``dtype`` at least as wide as that changes nothing.

    >>> rounded = identity_dtype_convert(jnp.bfloat16)
    >>> jax.grad(lambda x: 1.001 * rounded(x))(jnp.float32(2.0))
    Array(1., dtype=float32)
    >>> rounded(jnp.float32(1.001))
    Array(1.001, dtype=float32)

    Integers have no gradient, and complex numbers are a ``TypeError``. The same dtype gives the same function.
    """
    if not jnp.issubdtype(floating_dtype := np.dtype(dtype), jnp.floating):
        raise TypeError(f"dtype: takes a floating dtype; got {floating_dtype}")
    return _identity(floating_dtype)


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
        return (jax.tree.map(lambda g: _round(g, dtype), gradient),)

    identity.defvjp(forward, backward)
    return identity


def _round(gradient: Any, dtype: np.dtype[Any]) -> Any:
    """The gradient, cast to ``dtype`` and back. Without the barrier, XLA may remove both casts."""
    if gradient.dtype == jax.dtypes.float0 or jnp.promote_types(gradient.dtype, dtype) == dtype:
        return gradient
    return jax.lax.optimization_barrier(gradient.astype(dtype)).astype(gradient.dtype)
