"""``context_attention_bwd`` by exchanging heads for sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, hookimpl

from .mesh import check_inside
from .parts import gradients, in_order, plain_gradients
from .positions import shard_index
from .ulysses import PLATFORMS, VERSION, refuse_indivisible, to_heads, to_sequence, whole_call

__all__ = ["PLATFORMS", "VERSION"]

PARTS = ("flash_attention_bwd",)


@hookimpl
def heuristic_cfg(inv: Invocation) -> None:
    """Heads that the devices do not divide are refused."""
    refuse_indivisible(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, ...]:
    """The gradients that ``wrt`` names, in its order."""
    if inv["axis_size"] == 1:
        return plain_gradients(inv)
    check_inside(inv)
    # XLA sees that the forward has exchanged these too, and keeps them in place of the shards: they are as large.
    call = whole_call(inv)
    of_rows = {name: to_heads(inv, inv[name]) for name in ("out", "d_out")}
    by_name = gradients(inv, inv["wrt"], **call, **of_rows, **_statistics(inv))
    for name in ("query", "key", "value"):
        if name in by_name:
            by_name[name] = to_sequence(inv, by_name[name].astype(inv[name].dtype))
    if "softmax_aux" in by_name:
        by_name["softmax_aux"] = _of_all_heads(inv, by_name["softmax_aux"])
    return in_order(inv, by_name)


def _statistics(inv: Invocation) -> dict[str, jax.Array]:
    """The lse and its cotangent, in one exchange."""
    if inv["d_lse"] is None:
        return {"lse": to_heads(inv, inv["lse"], sequence=2, heads=1)}
    both = to_heads(inv, jnp.stack([inv["lse"], inv["d_lse"]], axis=-1), sequence=2, heads=1)
    return {"lse": both[..., 0], "d_lse": both[..., 1]}


def _of_all_heads(inv: Invocation, gradient: jax.Array) -> jax.Array:
    """The gradient of all sinks: other devices have the rest of the sum."""
    start = shard_index(inv["axis"]) * gradient.shape[0]
    zeros = jnp.zeros(inv["softmax_aux"].shape, gradient.dtype)
    return jax.lax.dynamic_update_slice_in_dim(zeros, gradient, start, axis=0)
