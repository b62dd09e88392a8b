"""The typed front door of ``moe_combine``."""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import ArrayLike

import ejkernel_core
from ejkernel_ops.front_door import front_door


@front_door
def moe_combine(
    y: ArrayLike,
    token_order: ArrayLike,
    weights: ArrayLike,
    *,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> jax.Array:
    """For each token, the weighted sum of what its experts made of it.

    >>> import jax.numpy as jnp
    >>> y = jnp.array([[20.0], [10.0], [11.0], [21.0]])  # in the order of the experts
    >>> moe_combine(y, jnp.array([2, 0, 1, 3]), jnp.array([[0.5, 0.5], [1.0, 0.0]]))[:, 0]
    Array([10.5, 20. ], dtype=float32)

    Args:
      y: (tokens * k, dim), in the order of the experts.
      token_order: Integers (tokens * k,), as ``moe_route`` returns them: a permutation.
      weights: (tokens, k), of any floating dtype.
      backend: Use this kernel, or raise with the reason.
      cfg: Use this configuration (of the kernel whose ``Config`` it is).
      validate: Check that ``token_order`` is a permutation, outside of ``jax.jit``.

    Returns:
      (tokens, dim), summed in float32 and rounded once to the dtype of ``y``. ``y`` and ``weights`` are differentiable.
    """
    call = {name: value for name, value in locals().items() if value is not None or name == "validate"}
    result: jax.Array = ejkernel_core.call("moe_combine", **call)
    return result
