"""The visits of a kernel: which tiles of rows, and for which group, one after another.

A tile of rows begins at a multiple of its size, wherever groups begin, so that several groups may have rows in it. Each
of them visits it, and a visit says which of its rows are meant. XLA makes the table from the sizes of the groups.
"""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp

#: The numbers of a visit, each with a row in the table: the tile of rows; the tile that is fetched, and the group whose
#: matrix is, both of the nearest visit that has rows if this one has none; the first row of the tile that is meant and
#: the row after the last one; and whether it is the first and the last of those that write to the same place.
NUMBERS = ("tile", "source", "group", "start", "end", "first", "last")


@attrs.frozen(eq=False)
class Visits:
    """The visits in order: a table in scalar memory, and how many there are. The rest of the table is not read."""

    #: (len(NUMBERS) * capacity).
    table: jax.Array
    #: (), at least 1.
    count: jax.Array
    capacity: int

    def read(self, table: Any, name: str, visit: Any) -> Any:
        """A number of a visit, from the table as a kernel sees it."""
        return table[NUMBERS.index(name) * self.capacity + visit]


def most_visits(rows: int, groups: int, tile: int) -> int:
    """One for each tile, and one more for each group after the first, which may begin inside a tile."""
    return -(-rows // tile) + groups


def by_tiles(boundaries: jax.Array, rows: int, tile: int) -> Visits:
    """Each tile once for each group with rows in it. A tile of no group is visited once, without a row."""
    starts, ends = boundaries[:-1], boundaries[1:]
    count = -(-rows // tile)
    first_tiles, counts = _tiles_of_groups(starts, ends, tile)
    begin, end = boundaries[0], boundaries[-1]
    # The tiles before the first group and after the last one are parts of their own.
    rest = jnp.where(begin < end, -(-end // tile), begin // tile)
    counts = jnp.concatenate([begin[None] // tile, counts, count - rest[None]])
    first_tiles = jnp.concatenate([jnp.zeros(1, jnp.int32), first_tiles, rest[None]])
    capacity = most_visits(rows, starts.shape[0], tile)
    part, place = _expanded(counts, capacity)
    tiles = jnp.minimum(first_tiles[part] + place, count - 1)
    none = jnp.zeros(1, jnp.int32)
    bounds = (jnp.concatenate([none, x, none])[part] - tiles * tile for x in (starts, ends))
    start, stop = (jnp.clip(x, 0, tile) for x in bounds)
    has_rows = ends > starts
    groups = jnp.arange(starts.shape[0], dtype=jnp.int32)
    last_group = jnp.max(jnp.where(has_rows, groups, 0))
    numbers = {
        "tile": tiles,
        "source": jnp.clip(tiles, begin // tile, jnp.maximum(end - 1, begin) // tile),
        "group": jnp.clip(part - 1, jnp.argmax(has_rows), last_group),
        "start": start,
        "end": stop,
    }
    return _visits(numbers, numbers["tile"], counts, capacity)


def by_groups(boundaries: jax.Array, rows: int, tile: int) -> Visits:
    """Each group once for each tile in which it has rows. A group without rows has one visit, without a row."""
    starts, ends = boundaries[:-1], boundaries[1:]
    first_tiles, counts = _tiles_of_groups(starts, ends, tile)
    counts = jnp.maximum(counts, 1)
    capacity = most_visits(rows, starts.shape[0], tile)
    group, place = _expanded(counts, capacity)
    tiles = jnp.minimum(first_tiles[group] + place, -(-rows // tile) - 1)
    numbers = {
        "tile": tiles,
        "source": tiles,
        "group": group,
        "start": jnp.clip(starts[group] - tiles * tile, 0, tile),
        "end": jnp.clip(ends[group] - tiles * tile, 0, tile),
    }
    return _visits(numbers, group, counts, capacity)


def _tiles_of_groups(starts: jax.Array, ends: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
    """The first tile of each group, and in how many tiles it has rows."""
    first = starts // tile
    return first, jnp.where(ends > starts, (ends - 1) // tile - first + 1, 0)


def _expanded(counts: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """For each visit the part that it belongs to, and its place among the visits of this part."""
    ends = jnp.cumsum(counts)
    visit = jnp.arange(capacity, dtype=jnp.int32)
    part = jnp.searchsorted(ends, visit, side="right").astype(jnp.int32)
    part = jnp.minimum(part, counts.shape[0] - 1)
    return part, visit - (ends - counts)[part]


def _visits(numbers: dict[str, jax.Array], output: jax.Array, counts: jax.Array, capacity: int) -> Visits:
    count = counts.sum()
    changes = output[1:] != output[:-1]
    yes = jnp.ones(1, bool)
    first = jnp.concatenate([yes, changes])
    last = jnp.concatenate([changes, yes]) | (jnp.arange(capacity) == count - 1)
    numbers = {**numbers, "first": first, "last": last}
    table = jnp.concatenate([numbers[name].astype(jnp.int32) for name in NUMBERS])
    return Visits(table, count.astype(jnp.int32), capacity)
