"""The typed front door of ``moe_order``."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.typing import ArrayLike

import ejkernel_core
from ejkernel_ops.front_door import front_door


class Order(NamedTuple):
    """The tokens in the order of the experts, as the last two results of ``moe_route``."""

    #: (num_experts,), int32: how often each expert was chosen.
    group_sizes: jax.Array
    #: (tokens * k,), int32: the places in ``experts``, flattened, in the order of their experts. Those of one expert
    #: are in the order of their tokens, and those without an expert come last.
    token_order: jax.Array


@front_door
def moe_order(
    experts: ArrayLike,
    num_experts: int,
    *,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> Order:
    """Order the tokens by experts that were chosen elsewhere, as ``grouped_matmul`` takes them.

    >>> import jax.numpy as jnp
    >>> moe_order(jnp.array([[1, 2], [0, 2]]), 3)
    Order(group_sizes=Array([1, 1, 2], dtype=int32), token_order=Array([2, 0, 1, 3], dtype=int32))

    Args:
      experts: Integers (tokens, k). A number that is not from 0 to ``num_experts - 1`` is a place without an expert: it
        is in no group, and comes last.
      num_experts: How many experts there are, known while tracing.
      backend: Use this kernel, or raise with the reason.
      cfg: Use this configuration (of the kernel whose ``Config`` it is).
      validate: Accepted, as by every operation; all values are valid.

    Returns:
      ``(group_sizes, token_order)``, which are integers without gradients.
    """
    call = {name: value for name, value in locals().items() if value is not None or name in ("num_experts", "validate")}
    return Order(*ejkernel_core.call("moe_order", **call))
