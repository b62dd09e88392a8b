"""The typed front door of ``moe_route``."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
from jax.typing import ArrayLike

import ejkernel_core
from ejkernel_ops.front_door import front_door

Score = Literal["softmax", "sigmoid", "softmax_after"]

#: Arguments that may not be None: an explicit None is passed on, and refused.
NEVER_NONE = ("k", "score", "renormalize", "scaling_factor", "validate")


class Routes(NamedTuple):
    """Which experts each token has, and the tokens in the order of the experts."""

    #: (tokens, k), float32.
    weights: jax.Array
    #: (tokens, k), int32: the best first.
    experts: jax.Array
    #: (experts,), int32: how many tokens each has.
    group_sizes: jax.Array
    #: (tokens * k,), int32: the places in ``experts``, flattened, in the order of their experts. Those of an expert are
    #: in the order of their tokens.
    token_order: jax.Array


@front_door
def moe_route(
    router_logits: ArrayLike,
    k: int,
    *,
    score: Score = "softmax",
    expert_bias: ArrayLike | None = None,
    num_groups: int | None = None,
    group_topk: int | None = None,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    backend: str | None = None,
    cfg: Any = None,
    validate: bool = False,
) -> Routes:
    """Choose ``k`` experts for each token, and order the tokens by expert, as ``grouped_matmul`` takes them.

    >>> import jax.numpy as jnp
    >>> routes = moe_route(jnp.array([[0.0, 2.0, 1.0], [3.0, 0.0, 3.0]]), 2)
    >>> routes.experts
    Array([[1, 2],
           [0, 2]], dtype=int32)
    >>> routes.group_sizes, routes.token_order
    (Array([1, 1, 2], dtype=int32), Array([2, 0, 1, 3], dtype=int32))

    Args:
      router_logits: (tokens, experts). Of equal ones the first expert is taken. NaN counts as -inf.
      k: How many experts each token has.
      score: "softmax" over all experts; "sigmoid"; or "softmax_after", which is over the chosen ones.
      expert_bias: (experts,), added to the scores when experts are chosen, and not to their weights. Its gradient is 0.
      num_groups: The experts are divided into so many groups of neighbours, of which only the best are chosen from: by
        the sum of the two best scores with an ``expert_bias``, else by the best one.
      group_topk: How many groups a token's experts are from.
      renormalize: Whether the weights of a token are divided by their sum.
      scaling_factor: By which the weights are multiplied.
      backend: Use this kernel, or raise with the reason.
      cfg: Use this configuration (of the kernel whose ``Config`` it is).
      validate: Accepted, as by every operation; all values are valid.

    Returns:
      ``(weights, experts, group_sizes, token_order)``. The weights are differentiable in the logits.
    """
    call = {name: value for name, value in locals().items() if value is not None or name in NEVER_NONE}
    return Routes(*ejkernel_core.call("moe_route", **call))
