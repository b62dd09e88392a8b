"""``moe_permute`` and ``moe_combine`` in plain JAX, by their definitions. Each is the gradient of the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def permuted(x: jax.Array, token_order: jax.Array, k: int) -> jax.Array:
    """The tokens in the order of their experts: each ``k`` times."""
    return x.at[token_order // k].get(mode="promise_in_bounds")


def places(token_order: jax.Array) -> jax.Array:
    """Where each place of ``experts`` is in the order: the inverse of a permutation."""
    numbers = jnp.arange(token_order.shape[0], dtype=token_order.dtype)
    return jnp.zeros_like(token_order).at[token_order].set(numbers, unique_indices=True, mode="promise_in_bounds")


def by_token(y: jax.Array, token_order: jax.Array, k: int) -> jax.Array:
    """The rows of each token, (tokens, k, dim)."""
    return y.at[places(token_order).reshape(-1, k)].get(unique_indices=True, mode="promise_in_bounds")


def combined(y: jax.Array, token_order: jax.Array, weights: jax.Array) -> jax.Array:
    """The sums of the rows of each token, in the order of its experts, weighted and rounded once."""
    dtype = jnp.promote_types(jnp.promote_types(y.dtype, weights.dtype), jnp.float32)
    rows = by_token(y, token_order, weights.shape[1]).astype(dtype)
    return (rows * weights.astype(dtype)[..., None]).sum(1).astype(y.dtype)
