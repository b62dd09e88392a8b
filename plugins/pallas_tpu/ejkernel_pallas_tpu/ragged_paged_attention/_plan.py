"""The tiles of a call in scalar memory: which sequence each is of, where its queries stand, which slots they see.

XLA makes them of lengths and starts, on the device. Tiles are dealt out to the cores of a chip in turn.
"""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_ops.flash_attention.geometry import pad_to
from ejkernel_ops.ragged_paged_attention.definition import lengths
from ejkernel_ops.ragged_paged_attention.tiles import tiles

from ._sizes import Sizes

#: The numbers of a tile.
FIELDS = ("sequence", "position", "queries", "first_slot", "end_slot", "before", "following")


@attrs.frozen(eq=False)
class Tile:
    """The numbers of one tile, or of all tiles. Without a key to see, both slots are 0."""

    #: -1 for no tile.
    sequence: Any
    #: That of its first query, and how many there are.
    position: Any
    queries: Any
    #: The first slot that a query of the tile sees, and the one behind the last.
    first_slot: Any
    end_slot: Any
    #: How many blocks its core has seen before, and the core's next tile that has a block, or -1.
    before: Any
    following: Any


@attrs.frozen(eq=False)
class Plan:
    """All tiles: their numbers, (fields * count), their first tokens, (count,), and the steps of a core."""

    numbers: jax.Array
    tiles: Tile
    first_token: jax.Array
    count: int
    steps: jax.Array

    def read(self, numbers: Any, tile: Any) -> Tile:
        """The numbers of a tile, from their reference."""
        return Tile(*(numbers[field * self.count + tile] for field in range(len(FIELDS))))


def plan(inv: Invocation, s: Sizes, cores: int) -> Plan:
    listed = tiles(inv, s.q_tile)
    count = cores * -(-listed.shape[1] // cores)
    sequence, first_token = pad_to(listed[0], 0, count, -1), pad_to(listed[1], 0, count, 0)
    own = jnp.maximum(sequence, 0)
    length, end = lengths(inv)[own], inv["query_start_loc"][own + 1]
    queries = jnp.clip(jnp.minimum(end, inv["query"].shape[0]) - first_token, 0, s.q_tile)
    position = length - (end - first_token)
    first_slot, end_slot = _visible(s, position, queries, length, sequence >= 0)
    blocks = -(-end_slot // s.k_block) - first_slot // s.k_block
    before, following = _in_order(blocks, cores)
    every = Tile(sequence, position, queries, first_slot, end_slot, before, following)
    numbers = jnp.concatenate([getattr(every, name) for name in FIELDS]).astype(jnp.int32)
    steps = jnp.maximum(-(-(sequence >= 0).sum() // cores), 1).astype(jnp.int32)
    return Plan(numbers, every, first_token, count, steps)


def _visible(s: Sizes, position: jax.Array, queries: jax.Array, length: jax.Array, is_there: jax.Array) -> Any:
    first = jnp.zeros_like(position) if s.left is None else jnp.clip(position - s.left, 0, length)
    end = length if s.right is None else jnp.clip(position + queries + s.right, 0, length)
    sees = is_there & (first < end)
    return jnp.where(sees, first, 0), jnp.where(sees, end, 0)


def _in_order(blocks: jax.Array, cores: int) -> tuple[jax.Array, jax.Array]:
    """Of each tile, the blocks before it and the next tile with a block, among those of its core."""
    count = blocks.shape[0]
    by_core = blocks.reshape(-1, cores)
    before = jnp.cumsum(by_core, 0) - by_core
    tile = jnp.arange(count, dtype=jnp.int32).reshape(-1, cores)
    from_here = jax.lax.cummin(jnp.where(by_core > 0, tile, count), 0, reverse=True)
    following = pad_to(from_here[1:], 0, tile.shape[0], count)
    return before.reshape(-1), jnp.where(following < count, following, -1).reshape(-1)
