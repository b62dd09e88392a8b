"""What every row brings to the backward passes."""

from __future__ import annotations

import attrs
import jax
import jax.numpy as jnp

from ejkernel_core import Invocation

LOG2E = 1.4426950408889634
LOWEST = float(jnp.finfo(jnp.float32).min)


@attrs.frozen(eq=False)
class Rows:
    """Of each query of each head: (batch, heads, length)."""

    d_out: jax.Array
    #: The log-sum-exp in units of log2; inf where a row saw nothing, so that its weights are 0.
    top: jax.Array
    #: The gradient of a logit is weight * (d_weight - shift): the softmax's own part of it, the sum of
    #: weight * d_weight over the row, is out . d_out, with dropout too; the log-sum-exp's own gradient comes off it.
    shift: jax.Array

    @classmethod
    def of(cls, inv: Invocation) -> Rows:
        lse, d_out, d_lse = inv["lse"], inv["d_out"], inv["d_lse"]
        nothing = lse == -jnp.inf
        shift = jnp.zeros(lse.shape, jnp.float32)
        if d_out is not None:
            shift = (d_out.astype(jnp.float32) * inv["out"].astype(jnp.float32)).sum(-1).transpose(0, 2, 1)
        if d_lse is not None:
            # Whatever arrives at a row whose log-sum-exp is -inf, and be it NaN, moves nothing.
            shift = shift - jnp.where(nothing, 0, d_lse)
        d_out = jnp.zeros_like(inv["out"]) if d_out is None else d_out
        top = jnp.where(nothing, jnp.inf, jnp.maximum(lse * LOG2E, LOWEST / 2))
        return cls(d_out.astype(inv["out"].dtype), top, shift)


def of_sinks(inv: Invocation, rows: Rows) -> jax.Array:
    """The gradient of sinks."""
    # A sink is one more weight of every row, with no value and so no d_weight. Of several the greatest is computed, and
    # the others as multiples of it: far from 0 their differences are exact, as those of their products are not.
    sinks = inv["softmax_aux"].astype(jnp.float32)
    greatest = sinks.max(1, initial=LOWEST / 2)
    # It is rounded as the tops are. A compiler would leave that out, and make one instruction of this and the next.
    logits = jax.lax.optimization_barrier(greatest * LOG2E)
    # Where it is all that a row sees, and far from 0, they differ by how one of them was rounded.
    weights = jnp.exp2(jnp.minimum(logits[None, :, None] - rows.top, 0))
    return -(weights * rows.shift).sum((0, 2))[:, None] * jnp.exp2((sinks - greatest[:, None]) * LOG2E)
