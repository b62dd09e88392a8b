"""The mean loss of the words of a head in plain JAX: from all logits, and in chunks of rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


@jax.custom_vjp
def wide_product(x: Any, matrix: Any) -> Any:
    """The product in float32. Its gradients are products of the operands' dtype, where JAX would widen the operands."""
    return jnp.matmul(x, matrix, preferred_element_type=jnp.float32)


def _wide_product_fwd(x: Any, matrix: Any) -> tuple[Any, tuple[Any, Any]]:
    return wide_product(x, matrix), (x, matrix)


def _wide_product_bwd(operands: tuple[Any, Any], d_out: Any) -> tuple[Any, Any]:
    x, matrix = operands
    d_out = d_out.astype(x.dtype)
    return d_out @ matrix.T, x.T @ d_out


wide_product.defvjp(_wide_product_fwd, _wide_product_bwd)


def row_losses(x: Any, matrix: Any, labels: Any) -> tuple[Any, Any]:
    """The loss of each row of x (rows, dim), from its logits, and their log-sum-exp."""
    logits = wide_product(x, matrix)
    lse = jax.nn.logsumexp(logits, axis=1)
    return lse - jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0], lse


def mean_in_chunks(x: Any, matrix: Any, labels: Any, chunk: int) -> Any:
    """The mean, in chunks of so many rows, whose logits are computed again in the backward."""

    @jax.checkpoint
    def add(total: Any, part: tuple[Any, Any]) -> tuple[Any, None]:
        rows, labels = part
        return total + row_losses(rows, matrix, labels)[0].sum(), None

    chunks = x.reshape(-1, chunk, x.shape[1]), labels.reshape(-1, chunk)
    total, _ = jax.lax.scan(add, jnp.float32(0), chunks)
    return total / labels.shape[0]
