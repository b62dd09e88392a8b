"""``grouped_matmul`` in plain JAX: each group's matrix times all rows, of which those of the group are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .activations import ACTIVATIONS
from .axes import result_dtype
from .groups import boundaries, row_groups

Arguments = Mapping[str, Any]


def arithmetic_dtype(array: Any) -> Any:
    """float32, or float64 for float64."""
    return jnp.promote_types(array.dtype, jnp.float32)


def forward(arguments: Arguments) -> jax.Array:
    """The result, rounded once."""
    lhs, rhs, bias = arguments["lhs"], arguments["rhs"], arguments["rhs_bias"]
    contracted = "gnk" if arguments["transpose_rhs"] else "gkn"
    dtype = arithmetic_dtype(lhs)
    group_of_row = row_groups(boundaries(arguments), lhs.shape[0])

    def product(number: int | jax.Array, matrix: jax.Array, *bias: jax.Array) -> jax.Array:
        own = (group_of_row == number)[:, None]
        # Other rows are masked before the product as well, so that neither they nor their gradients matter.
        rows = jnp.einsum(f"mk,{contracted[1:]}->mn", _masked(own, lhs), matrix, **_exactly(dtype))
        return _masked(own, rows + bias[0].astype(dtype) if bias else rows)

    numbers = jnp.arange(1, rhs.shape[0], dtype=jnp.int32)
    arrays = (rhs,) if bias is None else (rhs, bias)
    # Not from zeros: in shard_map, those would not vary over the axes of the mesh that the products vary over.
    hidden, _ = jax.lax.scan(
        lambda total, group: (total + product(*group), None),
        product(0, *(array[0] for array in arrays)),
        (numbers, *(array[1:] for array in arrays)),
    )
    return activated(hidden, arguments).astype(result_dtype(arguments))


def activated(hidden: jax.Array, arguments: Arguments) -> jax.Array:
    """The products with their bias, activated if the call says so. Rows of no group are 0, and stay so."""
    activation = arguments["activation"]
    return hidden if activation is None else ACTIVATIONS[activation](hidden)


def d_rhs(arguments: Arguments) -> jax.Array:
    """The gradient of ``rhs``: for each group the product of its rows, contracted over them."""
    lhs, d_out = arguments["lhs"], arguments["d_out"]
    dtype = arithmetic_dtype(lhs)
    text = "mk,mn->nk" if arguments["transpose_rhs"] else "mk,mn->kn"
    group_of_row = row_groups(arguments["boundaries"], lhs.shape[0])

    def product(number: jax.Array) -> jax.Array:
        own = (group_of_row == number)[:, None]
        return jnp.einsum(text, _masked(own, lhs), _masked(own, d_out), **_exactly(dtype))

    numbers = jnp.arange(arguments["boundaries"].shape[0] - 1, dtype=jnp.int32)
    gradient: jax.Array = jax.lax.map(product, numbers).astype(result_dtype(arguments))
    return gradient


def _masked(rows: jax.Array, array: jax.Array) -> jax.Array:
    return jnp.where(rows, array, jnp.zeros((), array.dtype))


def _exactly(dtype: Any) -> dict[str, Any]:
    return {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": dtype}
