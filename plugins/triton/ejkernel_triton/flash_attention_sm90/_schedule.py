"""Which program works on which tiles: assigned before the kernel runs, to end at the same time and share a cache."""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: One for each multiprocessor of an H100 or H200, which stays there.
PROGRAMS = 132
#: The tiles of some heads are assigned before those of the next. So many bytes of heads stay in the cache, in any order
#: of reads. In measurements up to 16 heads of more bytes were still faster: they do not stay in the cache, but programs
#: of one head read it at about the same time.
CACHE_BYTES = 24 << 20
MOST_HEADS, MOST_HEAD_BYTES = 16, 64 << 20
#: The least number of tiles that each program gets of such heads, where tiles are assigned in a zigzag.
LEAST_TILES = 4
#: The time before and after the loop of a tile, in steps of the loop.
TILE_OVERHEAD = 1


def schedule(
    rows: int,
    steps: tuple[int, ...] | jax.Array,
    row_bytes: int,
    group: int = 1,
    count: int = PROGRAMS,
) -> np.ndarray | jax.Array:
    """(programs, 1 + the largest number of tiles): the number of tiles of each program, and the tiles, as
    row * blocks + block. There are ``count`` programs, or one for each tile if there are fewer tiles.

    A row is a head of a sequence in the batch. ``group`` neighbouring rows read the same keys. ``steps`` are the steps
    of each block of a row. Of a few rows at a time, the longest tiles come first, and each goes to the program that is
    idle first. If the steps are an array, whose values are not known here, the longest tiles of all rows come before
    the shorter ones, among these those of a few rows, and they are assigned in a zigzag.

    >>> schedule(2, (1, 2, 3), row_bytes=0)
    array([[1, 2],
           [1, 5],
           [1, 1],
           [1, 4],
           [1, 0],
           [1, 3]], dtype=int32)
    """
    row_bytes = max(1, row_bytes)
    row_count = group * max(CACHE_BYTES // row_bytes, min(MOST_HEADS, MOST_HEAD_BYTES // row_bytes), 1)
    if isinstance(steps, tuple):
        # So many that the longest tile of the last rows takes no more than the average time of a program for them.
        least_rows = -(-(max(steps) + TILE_OVERHEAD) * count // sum(step + TILE_OVERHEAD for step in steps))
    else:
        # With fewer tiles for each program, each group of rows would begin with its longest tiles.
        least_rows = -(-LEAST_TILES * count // steps.size)
    row_count = max(row_count, group * -(-least_rows // group))
    row_count = group * -(-rows // (group * -(-rows // row_count)))
    assign = _assigned_to_idle if isinstance(steps, tuple) else _zigzag
    return assign(rows, steps, row_count, count)


@lru_cache(maxsize=64)
def _assigned_to_idle(rows: int, steps: tuple[int, ...], row_count: int, count: int) -> np.ndarray:
    blocks = sorted(range(len(steps)), key=lambda block: -steps[block])
    count = min(count, rows * len(steps))
    tiles: list[list[int]] = [[] for _ in range(count)]
    idle = [(0, program) for program in range(count)]
    for first in range(0, rows, row_count):
        for block in blocks:
            for row in range(first, min(first + row_count, rows)):
                end, program = idle[0]
                heapq.heapreplace(idle, (end + steps[block] + TILE_OVERHEAD, program))
                tiles[program].append(row * len(steps) + block)
    table = np.zeros((count, 1 + max(map(len, tiles))), np.int32)
    for program, own_tiles in enumerate(tiles):
        table[program, : 1 + len(own_tiles)] = [len(own_tiles), *own_tiles]
    table.setflags(write=False)  # the cache returns it again
    return table


def _zigzag(rows: int, steps: Any, row_count: int, count: int) -> jax.Array:
    """From the first program to the last and back, from the longest tiles to the shortest: the program with the longer
    one of two tiles gets the shorter one of the next two. Each pass has the tiles of few rows, which read the same.
    """
    (blocks,) = steps.shape
    count = min(count, rows * blocks)
    rank, row = np.divmod(np.arange(rows * blocks), rows)
    rank_count = -(-count // row_count)
    order = np.lexsort((row, rank, row // row_count, rank // rank_count))
    tile_count = -(-rows * blocks // count)
    positions = np.arange(tile_count * count).reshape(tile_count, count)
    positions[1::2] = positions[1::2, ::-1].copy()
    counts = (positions < rows * blocks).sum(0)
    assigned_tiles = order[np.minimum(positions, rows * blocks - 1)]
    # If each program has one tile, the order of blocks does not matter.
    longest = jnp.argsort(-steps) if tile_count > 1 else np.arange(blocks)
    tiles = row[assigned_tiles] * blocks + longest[rank[assigned_tiles]]
    return jnp.concatenate([counts[None], tiles]).T.astype(jnp.int32)
