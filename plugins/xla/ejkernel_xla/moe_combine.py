"""``moe_combine`` and its gradients, without a scatter of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, plain_kernel
from ejkernel_ops.moe_permute import definition


def _tokens(inv: Invocation) -> jax.Array:
    return definition.combined(inv["y"], inv["token_order"], inv["weights"])


def _gradients(inv: Invocation) -> tuple[jax.Array, ...]:
    y, order, weights, d_out = (inv[name] for name in ("y", "token_order", "weights", "d_out"))
    k = weights.shape[1]
    dtype = jnp.promote_types(jnp.promote_types(y.dtype, weights.dtype), jnp.float32)
    by_name: dict[str, jax.Array] = {}
    if "y" in inv["wrt"]:
        rows = definition.permuted(d_out, order, k).astype(dtype)
        by_name["y"] = rows * weights.reshape(-1)[order].astype(dtype)[:, None]
    if "weights" in inv["wrt"]:
        rows = definition.by_token(y, order, k).astype(dtype)
        by_name["weights"] = (rows * d_out.astype(dtype)[:, None]).sum(-1)
    return tuple(by_name[name].astype(inv[name].dtype) for name in inv["wrt"])


forward = plain_kernel(_tokens, rank=10, version=1)
backward = plain_kernel(_gradients, rank=10, version=1)
