"""Which tiles there are, listed by a kernel before the one that computes them: that depends on the sizes of groups."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def list_rows(
    boundaries, rows, table, GROUPS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr
):
    """The tiles of rows: first how many there are; then of each its group, its first row and the row where the group
    ends. Each of these entries has four numbers, of which the others are not written. Rows of no group are tiles of the
    group -1.
    """
    part = tl.arange(0, PARTS)
    starts = tl.load(boundaries + part - 1, mask=(part > 0) & (part <= GROUPS + 1), other=0)
    ends = tl.load(boundaries + part, mask=part <= GROUPS, other=0)
    ends = tl.where(part == GROUPS + 1, rows, ends)
    tiles = tl.where(part <= GROUPS + 1, (ends - starts + ROWS - 1) // ROWS, 0)
    tiles_so_far = tl.cumsum(tiles, 0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    number = tl.sum((tiles_so_far[None, :] <= tile[:, None]).to(tl.int32), 1)
    is_own = part[None, :] == number[:, None]
    first = tl.sum(tl.where(is_own, (starts - (tiles_so_far - tiles) * ROWS)[None, :], 0), 1) + tile * ROWS
    end = tl.sum(tl.where(is_own, ends[None, :], 0), 1)
    is_group = (number >= 1) & (number <= GROUPS)
    entry = table + 4 * (1 + tile)
    tl.store(entry, tl.where(is_group, number - 1, -1))
    tl.store(entry + 1, first)
    tl.store(entry + 2, end)
    if tl.program_id(0) == 0:
        tl.store(table, tl.sum(tiles, 0))


@triton.jit
def list_groups(boundaries, most, table, GROUPS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The groups: first how many have more rows than ``most``; then of each its number, its first row and the row where
    it ends. Those with the most rows come first, so that no program begins with a large one when others have ended.
    """
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    other = tl.arange(0, PARTS)
    start = tl.load(boundaries + group, mask=group < GROUPS, other=0)
    end = tl.load(boundaries + group + 1, mask=group < GROUPS, other=0)
    others = tl.load(boundaries + other + 1, mask=other < GROUPS, other=0)
    others -= tl.load(boundaries + other, mask=other < GROUPS, other=0)
    is_before = others[None, :] > (end - start)[:, None]
    is_before |= (others[None, :] == (end - start)[:, None]) & (other[None, :] < group[:, None])
    place = tl.sum((is_before & (other < GROUPS)[None, :]).to(tl.int32), 1)
    entry = table + 1 + 3 * place
    tl.store(entry, group, mask=group < GROUPS)
    tl.store(entry + 1, start, mask=group < GROUPS)
    tl.store(entry + 2, end, mask=group < GROUPS)
    if tl.program_id(0) == 0:
        tl.store(table, tl.sum((others > most).to(tl.int32), 0))
