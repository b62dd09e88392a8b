"""``moe_permute_bwd`` on any device JAX runs on: the sum of the rows of each token, in the order of its experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.moe_permute import definition

VERSION = 1
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, ...]:
    if not inv["wrt"]:
        return ()
    ones = jnp.ones((inv["x"].shape[0], inv["k"]), inv["d_out"].dtype)
    return (definition.combined(inv["d_out"], inv["token_order"], ones),)
