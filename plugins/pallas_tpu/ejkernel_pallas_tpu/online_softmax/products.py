"""Products of tiles, in float32."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from ejkernel_pallas_tpu.launch._arrays import LANES


def matmul_transposed(x: Any, y: Any) -> Any:
    """``x @ y.T``, in float32."""
    return _product(x, y, 1)


def matmul(weights: Any, y: Any) -> Any:
    """``weights @ y``, in float32, with weights rounded to the dtype of ``y``."""
    return _product(weights.astype(y.dtype), y, 0)


def _product(x: Any, y: Any, axis: int) -> Any:
    # One pass of the matrix unit multiplies bfloat16 exactly; float32 takes six.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    contracted = (((1,), (axis,)), ((), ()))
    return lax.dot_general(x, y, contracted, precision=precision, preferred_element_type=jnp.float32)


def widen(column: Any, width: int) -> Any:
    """(n, lanes), the same in every lane, as (n, width)."""
    copies = jnp.concatenate([column] * -(-width // LANES), axis=1) if width > LANES else column
    return copies if copies.shape[1] == width else copies[:, :width]
