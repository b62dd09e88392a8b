"""What every query brings to the backward passes."""

from __future__ import annotations

import attrs
import jax
import jax.numpy as jnp

from ejkernel_pallas_tpu.flash_attention._problem import LOG2E, Arguments


@attrs.frozen(eq=False)
class Rows:
    """Of each query of each head."""

    d_out: jax.Array
    #: The log-sum-exp in units of log2; inf where a query saw nothing, so that its weights are 0.
    top: jax.Array
    #: The gradient of a logit is weight * (d_weight - shift): the softmax's own part of it, the sum of
    #: weight * d_weight over the row, is out . d_out, with dropout too; the log-sum-exp's own gradient comes off it.
    shift: jax.Array


def rows(a: Arguments) -> Rows:
    """From the forward's results and what came back for them."""
    out, lse, d_out, d_lse = a["out"], a["lse"], a["d_out"], a["d_lse"]
    nothing = lse == -jnp.inf
    shift = jnp.zeros(lse.shape, jnp.float32)
    if d_out is not None:
        shift = jnp.swapaxes((d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1), 1, 2)
    if d_lse is not None:
        # Whatever arrives at a query that saw nothing, and be it NaN, moves nothing.
        shift = shift - jnp.where(nothing, 0.0, d_lse)
    d_out = jnp.zeros_like(out) if d_out is None else d_out.astype(out.dtype)
    return Rows(d_out, jnp.where(nothing, jnp.inf, lse * LOG2E), shift)


def of_sinks(a: Arguments, of: Rows) -> jax.Array:
    """The gradient of (heads, n) sinks: each is one more weight of every row, with no value and so no d_weight."""
    sinks = a["softmax_aux"].astype(jnp.float32) * LOG2E

    def gradient(sink: jax.Array) -> jax.Array:
        # Where it is all that a row sees, and far from 0, they differ by how one of them was rounded.
        weight = jnp.exp2(jnp.minimum(sink[None, :, None] - of.top, 0))
        return -(weight * of.shift).sum((0, 2))

    # One sink of each head at a time, for memory's sake.
    each: jax.Array = jax.lax.map(gradient, sinks.T)
    return each.T
