"""The experts of each token by a sort of their logits, and the gradients of their weights."""

from __future__ import annotations

import jax

from ejkernel_core import Invocation, plain_kernel
from ejkernel_ops.moe_route import definition
from ejkernel_xla.moe_order import ordered


def _routes(inv: Invocation) -> tuple[jax.Array, ...]:
    weights, experts = definition.chosen(inv)
    return weights, experts, *ordered(experts, inv["router_logits"].shape[-1])


forward = plain_kernel(_routes, rank=10, version=1)
backward = plain_kernel(definition.gradients, rank=10, version=1)
