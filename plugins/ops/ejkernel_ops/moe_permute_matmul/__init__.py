"""The typed front door of ``moe_permute_matmul``."""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import ArrayLike, DTypeLike

import ejkernel_core
from ejkernel_ops.front_door import front_door
from ejkernel_ops.grouped_matmul import NEVER_NONE, Activation, Precision


@front_door
def moe_permute_matmul(
    x: ArrayLike,
    token_order: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    k: int,
    *,
    group_offset: ArrayLike | None = None,
    transpose_rhs: bool = False,
    rhs_bias: ArrayLike | None = None,
    activation: Activation | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: Precision | None = None,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> jax.Array:
    """The product of each token with the matrices of its experts: ``grouped_matmul`` of what ``moe_permute`` returns.

    A kernel that reads the tokens where they are does not write them in the order of the experts:

    >>> import jax, jax.numpy as jnp
    >>> from ejkernel_ops import grouped_matmul, moe_permute, moe_route
    >>> x = jax.random.normal(jax.random.key(0), (10, 8))
    >>> experts = jax.random.normal(jax.random.key(1), (4, 8, 6))
    >>> routes = moe_route(jax.random.normal(jax.random.key(2), (10, 4)), 2)
    >>> out = moe_permute_matmul(x, routes.token_order, experts, routes.group_sizes, 2)
    >>> rows = moe_permute(x, routes.token_order, 2)
    >>> bool(jnp.allclose(out, grouped_matmul(rows, experts, routes.group_sizes), atol=1e-5))
    True

    Args:
      x: (tokens, dim).
      token_order: Integers (tokens * k,), as ``moe_route`` returns them: a permutation.
      rhs: (groups, dim, n), or (groups, n, dim) with ``transpose_rhs``, in the dtype of ``x``.
      group_sizes: Integers (groups,): how many rows each group has, as ``moe_route`` returns them; 0 is allowed. Rows
        after the last group give 0 and have no part in a gradient.
      k: How many experts each token has.
      group_offset: An integer, for parallel experts: ``rhs`` has the groups of ``group_sizes`` from this one on. Rows
        of all others give 0.
      transpose_rhs: Whether the last two axes of ``rhs`` are (n, dim).
      rhs_bias: (groups, n), added to the product.
      activation: "silu_gated", "gelu_gated" or "swiglu_oai", as in ``grouped_matmul``. The result has n / 2 columns.
      preferred_element_type: The dtype of the result; by default that of ``x``.
      precision: How exactly float32 is multiplied, as in ``grouped_matmul``.
      backend: Use this kernel, or raise with the reason.
      cfg: Use this configuration (of the kernel whose ``Config`` it is).
      validate: Check the values of ``token_order``, ``group_sizes`` and ``group_offset``, outside of ``jax.jit``.

    Returns:
      (tokens * k, n), or (tokens * k, n / 2) with an activation. ``x``, ``rhs`` and ``rhs_bias`` are differentiable.
    """
    call = {name: value for name, value in locals().items() if value is not None or name in (*NEVER_NONE, "k")}
    result: jax.Array = ejkernel_core.call("moe_permute_matmul", **call)
    return result
