"""``moe_order`` on any device JAX runs on, by a sort of one array."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel_core import plain_kernel
from ejkernel_ops.moe_route import definition
from ejkernel_ops.symbolic import is_symbolic


def ordered(experts: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """How many places each expert has, and the places in the order of the experts, which are at most ``count``.

    On a CPU, a sort of numbers that have the expert and the place takes a fraction of one that moves the places along.
    """
    places = experts.size
    if is_symbolic(places) or (count + 1) * places > jnp.iinfo(jnp.int32).max:
        return definition.ordered(experts, count)
    keys = experts.reshape(-1) * places + jnp.arange(places, dtype=jnp.int32)
    return definition.group_sizes(experts, count), jnp.sort(keys, stable=False) % max(places, 1)


forward = plain_kernel(lambda inv: ordered(inv["experts"], inv["num_experts"]), rank=10, version=1)
