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
    has_rows = ends > starts
    groups = jnp.arange(starts.shape[0], dtype=jnp.int32)
    first_group, last_group = jnp.argmax(has_rows), jnp.max(jnp.where(has_rows, groups, 0))
    parts = {
        "count": _around(begin // tile, counts, count - rest),
        "tile": _around(0, first_tiles, rest),
        "group": _around(first_group, jnp.clip(groups, first_group, last_group), last_group),
        "start": _around(0, starts, 0),
        "end": _around(0, ends, 0),
    }
    visits, total = _expanded(parts, most_visits(rows, starts.shape[0], tile))
    tiles = visits["tile"]
    source = jnp.clip(tiles, begin // tile, jnp.maximum(end - 1, begin) // tile)
    return _visits({**visits, "source": source}, tiles, total, tile)


def by_groups(boundaries: jax.Array, rows: int, tile: int) -> Visits:
    """Each group once for each tile in which it has rows. A group without rows has one visit, without a row."""
    starts, ends = boundaries[:-1], boundaries[1:]
    first_tiles, counts = _tiles_of_groups(starts, ends, tile)
    parts = {
        "count": jnp.maximum(counts, 1),
        # That of an empty group may be behind the last row.
        "tile": jnp.minimum(first_tiles, -(-rows // tile) - 1),
        "group": jnp.arange(starts.shape[0], dtype=jnp.int32),
        "start": starts,
        "end": ends,
    }
    visits, total = _expanded(parts, most_visits(rows, starts.shape[0], tile))
    return _visits({**visits, "source": visits["tile"]}, visits["group"], total, tile)


def _tiles_of_groups(starts: jax.Array, ends: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
    """The first tile of each group, and in how many tiles it has rows."""
    first = starts // tile
    return first, jnp.where(ends > starts, (ends - 1) // tile - first + 1, 0)


def _around(before: Any, values: jax.Array, after: Any) -> jax.Array:
    return jnp.concatenate([jnp.asarray(x, jnp.int32).reshape(-1) for x in (before, values, after)])


def _expanded(parts: dict[str, jax.Array], capacity: int) -> tuple[dict[str, jax.Array], jax.Array]:
    """For each visit, the numbers of its part, the tile being the one that it visits; and how many visits there are.

    Each number is a sum over all parts, of which one is not masked: a TPU takes longer to gather.
    """
    counts = parts["count"]
    ends = jnp.cumsum(counts)
    first = ends - counts
    visit = jnp.arange(capacity, dtype=jnp.int32)
    own = (visit[:, None] >= first) & (visit[:, None] < ends)
    numbers = jnp.stack([parts["tile"] - first, parts["group"], parts["start"], parts["end"]])
    tile, group, start, end = jnp.where(own, numbers[:, None], 0).sum(-1, dtype=jnp.int32)
    return {"tile": tile + visit, "group": group, "start": start, "end": end}, ends[-1]


def _visits(numbers: dict[str, jax.Array], output: jax.Array, count: jax.Array, tile: int) -> Visits:
    """With the rows of a visit counted from the first one of its tile."""
    bounds = {name: jnp.clip(numbers[name] - numbers["tile"] * tile, 0, tile) for name in ("start", "end")}
    changes = output[1:] != output[:-1]
    yes = jnp.ones(1, bool)
    capacity = output.shape[0]
    first = jnp.concatenate([yes, changes])
    last = jnp.concatenate([changes, yes]) | (jnp.arange(capacity) == count - 1)
    numbers = {**numbers, **bounds, "first": first, "last": last}
    table = jnp.concatenate([numbers[name].astype(jnp.int32) for name in NUMBERS])
    return Visits(table, count.astype(jnp.int32), capacity)
