"""The gated activations that ``grouped_matmul`` can apply to its result."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

#: Of "swiglu_oai": the factor inside the sigmoid, and the largest gate and magnitude.
ALPHA, LIMIT = 1.702, 7.0


def silu_gated(hidden: jax.Array) -> jax.Array:
    """``silu(gate) * up``: the gate is the first half of a row."""
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jax.nn.silu(gate) * up


def gelu_gated(hidden: jax.Array) -> jax.Array:
    """``gelu(gate) * up``, by the approximation with tanh: the gate is the first half of a row."""
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jax.nn.gelu(gate, approximate=True) * up


def swiglu_oai(hidden: jax.Array) -> jax.Array:
    """``gate * sigmoid(1.702 * gate) * (up + 1)``, with the gate at most 7 and up from -7 to 7. They alternate in a
    row, the gate first.
    """
    gate, up = jnp.minimum(hidden[..., ::2], LIMIT), jnp.clip(hidden[..., 1::2], -LIMIT, LIMIT)
    return gate * jax.nn.sigmoid(ALPHA * gate) * (up + 1)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu_gated": silu_gated,
    "gelu_gated": gelu_gated,
    "swiglu_oai": swiglu_oai,
}
