"""Which program works on which tiles: dealt out before the kernel runs, so that all end together and share a cache."""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: Multiprocessors, where they are not those of an H100 or H200: a program stays on each.
MULTIPROCESSORS = {"NVIDIA H100 PCIe": 114, "NVIDIA H800 PCIe": 114, "NVIDIA H100 NVL": 132, "NVIDIA H20": 78}
USUAL = 132
#: Of how many heads tiles are dealt out together: as many as stay in the cache whoever reads when, and by measurement
#: up to 16 that have so many bytes. These do not stay there, but programs that share a head read it side by side.
CACHE = 24 << 20
AT_ONCE, TOGETHER = 16, 64 << 20
#: Where tiles are dealt out there and back, those of the rows that are dealt out together take so many turns at least.
TURNS = 4
#: What beginning and ending a tile takes, in steps of its loop.
AROUND = 1


def programs(device_kind: str | None) -> int:
    """How many run at a time."""
    return MULTIPROCESSORS.get(device_kind or "", USUAL)


def schedule(
    rows: int, steps: tuple[int, ...] | jax.Array, row_bytes: int, group: int = 1, count: int = USUAL
) -> np.ndarray | jax.Array:
    """(programs, 1 + the most tiles that one has): their number, and the tiles, as row * blocks + block. There are
    ``count`` programs, or one for each tile if these are fewer.

    A row is a head of a sequence in the batch, ``group`` neighbours of which read the same; ``steps`` are those of its
    blocks. Of a few rows at a time what is longest comes first, and each tile goes to who would be free first. Where
    only an array says how many steps there are, the longest tiles of all rows come before the shorter ones, among these
    those of a few rows, and they are dealt out there and back.

    >>> schedule(2, (1, 2, 3), row_bytes=0)
    array([[1, 2],
           [1, 5],
           [1, 1],
           [1, 4],
           [1, 0],
           [1, 3]], dtype=int32)
    """
    row_bytes = max(1, row_bytes)
    at_once = group * max(CACHE // row_bytes, min(AT_ONCE, TOGETHER // row_bytes), 1)
    if isinstance(steps, tuple):
        # It takes so many that the longest tile of the last heads is no more than all that a program does for these.
        even = -(-(max(steps) + AROUND) * count // sum(step + AROUND for step in steps))
    else:
        # With fewer turns than that each of them would begin with the longest tiles of its heads.
        even = -(-TURNS * count // steps.size)
    at_once = max(at_once, group * -(-even // group))
    at_once = group * -(-rows // (group * -(-rows // at_once)))
    deal = _dealt if isinstance(steps, tuple) else _there_and_back
    return deal(rows, steps, at_once, count)


@lru_cache(maxsize=64)
def _dealt(rows: int, steps: tuple[int, ...], at_once: int, count: int) -> np.ndarray:
    blocks = sorted(range(len(steps)), key=lambda block: -steps[block])
    count = min(count, rows * len(steps))
    tiles: list[list[int]] = [[] for _ in range(count)]
    free = [(0, program) for program in range(count)]
    for first in range(0, rows, at_once):
        for block in blocks:
            for row in range(first, min(first + at_once, rows)):
                when, program = free[0]
                heapq.heapreplace(free, (when + steps[block] + AROUND, program))
                tiles[program].append(row * len(steps) + block)
    table = np.zeros((count, 1 + max(map(len, tiles))), np.int32)
    for program, mine in enumerate(tiles):
        table[program, : 1 + len(mine)] = [len(mine), *mine]
    table.setflags(write=False)  # it is handed out again
    return table


def _there_and_back(rows: int, steps: Any, at_once: int, count: int) -> jax.Array:
    """To the last program and back to the first, from the longest tiles to the shortest: whoever got the longer one of
    two gets the shorter one of the next two. Each time these are tiles of few rows, that share what they read.
    """
    (blocks,) = steps.shape
    count = min(count, rows * blocks)
    rank, row = np.divmod(np.arange(rows * blocks), rows)
    side_by_side = -(-count // at_once)
    order = np.lexsort((row, rank, row // at_once, rank // side_by_side))
    turns = -(-rows * blocks // count)
    place = np.arange(turns * count).reshape(turns, count)
    place[1::2] = place[1::2, ::-1].copy()
    counts = (place < rows * blocks).sum(0)
    dealt = order[np.minimum(place, rows * blocks - 1)]
    # Who has but one tile has it in any order.
    longest = jnp.argsort(-steps) if turns > 1 else np.arange(blocks)
    tiles = row[dealt] * blocks + longest[rank[dealt]]
    return jnp.concatenate([counts[None], tiles]).T.astype(jnp.int32)
