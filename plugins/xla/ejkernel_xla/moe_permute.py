"""``moe_permute`` and its gradients, in which tokens add up the rows of their places: without a scatter of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, plain_kernel
from ejkernel_ops.moe_permute import definition


def _rows(inv: Invocation) -> jax.Array:
    return definition.permuted(inv["x"], inv["token_order"], inv["k"])


def _gradients(inv: Invocation) -> tuple[jax.Array, ...]:
    if not inv["wrt"]:
        return ()
    ones = jnp.ones((inv["x"].shape[0], inv["k"]), inv["d_out"].dtype)
    return (definition.combined(inv["d_out"], inv["token_order"], ones),)


forward = plain_kernel(_rows, rank=10, version=1)
backward = plain_kernel(_gradients, rank=10, version=1)
