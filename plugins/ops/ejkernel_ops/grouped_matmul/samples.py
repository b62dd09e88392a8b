"""Meaningful inputs for abstract ones, to measure a call of which only the shapes are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .axes import AXES, D_RHS_AXES

Arguments = dict[str, Any]

#: The concentration of the Dirichlet distribution from which the shares of the groups are drawn.
CONCENTRATION = 4.0


def samples(arguments: Mapping[str, Any], key: Any) -> Arguments:
    """The derived samples, with sizes that add up to the rows. A part of the groups begins at the first."""
    sizes_key, key = jax.random.split(key)
    concrete = AXES.samples(arguments, key)  # an offset is 0
    sizes = arguments["group_sizes"]
    if isinstance(sizes, jax.ShapeDtypeStruct):
        concrete["group_sizes"] = group_sizes(sizes_key, arguments["lhs"].shape[0], sizes.shape[0])
    return concrete


def d_rhs_samples(arguments: Mapping[str, Any], key: Any) -> Arguments:
    """The derived samples, with boundaries of groups that have all rows."""
    sizes_key, key = jax.random.split(key)
    concrete = D_RHS_AXES.samples(arguments, key)
    boundaries = arguments["boundaries"]
    if isinstance(boundaries, jax.ShapeDtypeStruct):
        sizes = group_sizes(sizes_key, arguments["lhs"].shape[0], boundaries.shape[0] - 1)
        concrete["boundaries"] = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes, dtype=jnp.int32)])
    return concrete


def group_sizes(key: Any, rows: int, groups: int) -> jax.Array:
    """Sizes of groups that add up to the rows, as uneven as those of a router.

    >>> group_sizes(jax.random.key(0), 100, 4)
    Array([21, 22, 17, 40], dtype=int32)
    """
    shares = jax.random.dirichlet(key, jnp.full(groups, CONCENTRATION))
    ends = jnp.round(jnp.cumsum(shares) * rows).astype(jnp.int32)
    return jnp.diff(ends.at[-1].set(rows), prepend=0)
