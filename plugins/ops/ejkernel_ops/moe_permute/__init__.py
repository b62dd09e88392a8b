"""The typed front door of ``moe_permute``."""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import ArrayLike

import ejkernel_core
from ejkernel_ops.front_door import front_door


@front_door
def moe_permute(
    x: ArrayLike,
    token_order: ArrayLike,
    k: int,
    *,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> jax.Array:
    """The tokens in the order of their experts, as ``grouped_matmul`` takes them.

    >>> import jax.numpy as jnp
    >>> moe_permute(jnp.array([[1.0], [2.0]]), jnp.array([2, 0, 1, 3]), 2)[:, 0]
    Array([2., 1., 1., 2.], dtype=float32)

    Args:
      x: (tokens, dim).
      token_order: Integers (tokens * k,), as ``moe_route`` returns them: a permutation.
      k: How many experts each token has.
      backend: Use this kernel, or raise with the reason.
      cfg: Use this configuration (of the kernel whose ``Config`` it is).
      validate: Check that ``token_order`` is a permutation, outside of ``jax.jit``.

    Returns:
      (tokens * k, dim), in the dtype of ``x``, which is differentiable.
    """
    call = {name: value for name, value in locals().items() if value is not None or name in ("k", "validate")}
    result: jax.Array = ejkernel_core.call("moe_permute", **call)
    return result
