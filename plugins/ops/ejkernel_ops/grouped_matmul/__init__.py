"""The typed front door of ``grouped_matmul``.

Beside it: ``operation`` with its ``axes`` and ``arguments``, ``definition`` in plain JAX, ``gradients``, which is how
kernels compute them, and ``examples``.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
from jax.typing import ArrayLike, DTypeLike

import ejkernel_core
from ejkernel_ops.front_door import front_door

Activation = Literal["silu_gated", "gelu_gated", "swiglu_oai"]
Precision = Literal["highest", "high", "default"] | jax.lax.Precision

#: Arguments that may not be None: an explicit None is passed on, and refused.
NEVER_NONE = ("transpose_rhs", "validate")


@front_door
def grouped_matmul(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
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
    """The product of each group of rows with a matrix of its own, by the best installed kernel for the device at hand.

    The rows of ``lhs`` are ordered by group, as the tokens of a mixture of experts are by expert:

    >>> import jax, jax.numpy as jnp
    >>> tokens = jax.random.normal(jax.random.key(0), (100, 64), jnp.bfloat16)
    >>> experts = jax.random.normal(jax.random.key(1), (3, 64, 32), jnp.bfloat16)
    >>> out = grouped_matmul(tokens, experts, jnp.array([30, 0, 70]))
    >>> out.shape
    (100, 32)
    >>> bool(jnp.allclose(out[30:], tokens[30:] @ experts[2], rtol=1e-2, atol=1e-1))
    True

    With an activation, ``rhs`` has the gates and the values of a gated layer, and only its result is written:

    >>> grouped_matmul(tokens, experts, jnp.array([30, 0, 70]), activation="silu_gated").shape
    (100, 16)

    Args:
      lhs: (rows, k).
      rhs: (groups, k, n), or (groups, n, k) with ``transpose_rhs``, in the dtype of ``lhs``.
      group_sizes: Integers (groups,): how many rows each group has; 0 is allowed. Rows after the last group give 0 and
        have no part in a gradient. More rows than there are is undefined.
      group_offset: An integer, for parallel experts: ``rhs`` has the groups of ``group_sizes`` from this one on. Rows
        of all others give 0.
      transpose_rhs: Whether the last two axes of ``rhs`` are (n, k).
      rhs_bias: (groups, n), added to the product.
      activation: "silu_gated" or "gelu_gated" (with tanh), where the gates are the first half of n and the values the
        second; "swiglu_oai", where they alternate. The result has n / 2 columns.
      preferred_element_type: The dtype of the result; by default that of ``lhs``.
      precision: How exactly float32 is multiplied: "highest", the default; "high"; "default", which on GPUs is
        TensorFloat-32. Other dtypes ignore it.
      backend: Use this kernel, or raise with the reason.
      cfg: Use this configuration (of the kernel whose ``Config`` it is).
      validate: Check the values of ``group_sizes`` and ``group_offset``, outside of ``jax.jit``.

    Returns:
      (rows, n), or (rows, n / 2) with an activation. ``lhs``, ``rhs`` and ``rhs_bias`` are differentiable.
    """
    call = {name: value for name, value in locals().items() if value is not None or name in NEVER_NONE}
    result: jax.Array = ejkernel_core.call("grouped_matmul", **call)
    return result
