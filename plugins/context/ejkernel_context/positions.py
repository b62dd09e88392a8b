"""The positions of a device's tokens in the whole sequence."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .arguments import check_even, check_layout, shards_of
from .mesh import Names, axis_names


def positions(length: int, axis: Any, *, layout: str = "zigzag") -> jax.Array:
    """The positions in the whole sequence of the tokens of this device, int32: for rotary embeddings, say.

    For use inside ``shard_map``.

    Args:
      length: The number of tokens of a device.
      axis: The name of the mesh axis that the sequence is sharded over, or a tuple of names.
      layout: "zigzag" or "contiguous".

    >>> mesh = jax.make_mesh((1,), ("seq",))
    >>> jax.shard_map(lambda: positions(4, "seq"), mesh=mesh, in_specs=(), out_specs=jax.P("seq"))()
    Array([0, 1, 2, 3], dtype=int32)
    """
    names = axis_names(axis)
    check_layout(layout)
    shards = shards_of(names, None)
    if layout == "zigzag":
        check_even("length", length, names, shards)
    return shard_positions(length, layout, shards, shard_index(names))


def shard_index(names: Names) -> Any:
    """The number of this device along the axes."""
    return jax.lax.axis_index(names) if names else 0


def shard_positions(length: int, layout: str, shards: int, shard: Any) -> jax.Array:
    """The positions of the tokens of a shard, which has ``length`` of them."""
    if layout == "contiguous" or shards == 1:
        return jnp.asarray(shard * length + jnp.arange(length, dtype=jnp.int32), jnp.int32)
    chunk = length // 2
    within = jnp.arange(chunk, dtype=jnp.int32)
    first, last = shard * chunk, (2 * shards - 1 - shard) * chunk
    return jnp.concatenate([first + within, last + within]).astype(jnp.int32)
