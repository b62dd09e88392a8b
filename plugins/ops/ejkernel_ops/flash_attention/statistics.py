"""Statistics of rows of scores that the backward needs: one number for each query of each head, (batch, heads, length).

The gradient of a logit is ``weight * (d_weight - delta)``, where the weight is ``exp(logit - lse)``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

Arguments = Mapping[str, Any]

#: Converts natural logarithms to base 2, the base of the exponentials of accelerators.
LOG2E = math.log2(math.e)


def statistics_dtype(arguments: Arguments) -> Any:
    """Statistics and sums are float32, and float64 for float64 inputs.

    >>> statistics_dtype({"query": jax.ShapeDtypeStruct((1, 8, 2, 16), "bfloat16")})
    dtype('float32')
    """
    return np.promote_types(arguments["query"].dtype, np.float32)


def delta(arguments: Arguments) -> jax.Array:
    """For each query, the sum of ``out * d_out``, less the cotangent of its lse.

    The sum is the softmax's part of the gradient: the sum of ``weight * d_weight`` over the row, with dropout too.
    """
    out, d_out, d_lse = (arguments[name] for name in ("out", "d_out", "d_lse"))
    dtype = statistics_dtype(arguments)
    sums = jnp.zeros(arguments["lse"].shape, dtype)
    if d_out is not None:
        sums = (d_out.astype(dtype) * out.astype(dtype)).sum(-1).transpose(0, 2, 1)
    if d_lse is not None:
        # The lse of a row that sees nothing is constant: its cotangent, even NaN, changes nothing.
        sums = sums - jnp.where(arguments["lse"] == -jnp.inf, 0, d_lse).astype(dtype)
    return sums


def weights_lse(lse: jax.Array) -> jax.Array:
    """The lse that weights are computed with: inf where a row sees nothing, so that ``exp(logit - lse)`` is 0.

    >>> weights_lse(jnp.array([-jnp.inf, 2.0])).tolist()
    [inf, 2.0]
    """
    return jnp.where(lse == -jnp.inf, jnp.inf, lse)


def weights_lse_base2(lse: jax.Array, lowest: float | None = None) -> jax.Array:
    """`weights_lse` in base 2, for ``exp2(logit * LOG2E - lse)``; finite numbers are no lower than ``lowest``.

    >>> weights_lse_base2(jnp.array([-jnp.inf, 0.0, -5.0]), lowest=-4.0).tolist()
    [inf, 0.0, -4.0]
    """
    scaled = lse * LOG2E
    if lowest is not None:
        scaled = jnp.maximum(scaled, lowest)
    return jnp.where(lse == -jnp.inf, jnp.inf, scaled)


@attrs.frozen(eq=False)
class BackwardRows:
    """What a backward kernel with exponentials of base 2 reads for each query, in addition to the forward's inputs."""

    d_out: jax.Array
    #: In base 2; inf where a row sees nothing.
    lse: jax.Array
    delta: jax.Array

    @classmethod
    def of(cls, arguments: Arguments, lowest_lse: float | None = None) -> BackwardRows:
        """From the forward's results and their cotangents."""
        out, d_out = arguments["out"], arguments["d_out"]
        d_out = jnp.zeros_like(out) if d_out is None else d_out.astype(out.dtype)
        return cls(d_out, weights_lse_base2(arguments["lse"], lowest_lse), delta(arguments))


def sinks_gradient(sinks: jax.Array, lse: jax.Array, delta: jax.Array, base2: bool = False) -> jax.Array:
    """The gradient of sinks, (heads, n), from the lse that weights are computed with, of base e or 2.

    A sink is one more weight of every row, with no value and so no d_weight. Of several sinks the weight of the
    greatest is computed, and the others are multiples of it: far from 0 the differences of sinks are exact, and those
    of their products with LOG2E are not.

    >>> sinks, lse, delta = jnp.zeros((1, 2)), jnp.log(jnp.array([[[4.0, 8.0]]])), jnp.array([[[1.0, 2.0]]])
    >>> sinks_gradient(sinks, lse, delta).tolist()
    [[-0.5, -0.5]]
    """
    exp, unit = (jnp.exp2, LOG2E) if base2 else (jnp.exp, 1.0)
    lowest = float(jnp.finfo(delta.dtype).min) / (2 if base2 else 1)  # its product with LOG2E is finite
    sinks = sinks.astype(delta.dtype)
    greatest = sinks.max(1, initial=lowest)
    logits = greatest
    if base2:
        # Rounded like the lse: a compiler would fuse this product with the difference below, which skips the rounding.
        logits = jax.lax.optimization_barrier(greatest * LOG2E)
    # A sink is at most the lse, except for rounding.
    weights = exp(jnp.minimum(logits[None, :, None] - lse, 0))
    return -(weights * delta).sum((0, 2))[:, None] * exp((sinks - greatest[:, None]) * unit)
