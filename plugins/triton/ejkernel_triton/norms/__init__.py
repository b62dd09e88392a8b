"""``rms_norm`` and ``layer_norm``, their gradients and their results of 8 bits, on NVIDIA GPUs, in Triton."""

from __future__ import annotations

import attrs
from attrs.validators import ge, in_, instance_of, le

WARPS = (1, 2, 4, 8, 16, 32)
BLOCKS = (0, 1024, 2048, 4096, 8192, 16384)
#: The most programs of a multiprocessor: more than any holds, and few enough to number those of all in 32 bits.
MOST_PROGRAMS = 1024


@attrs.frozen
class Config:
    """How rows are divided among programs, and how each program is run."""

    #: Rows of a tile.
    rows: int = attrs.field(default=1, validator=in_(tuple(1 << power for power in range(13))))
    num_warps: int = attrs.field(default=4, validator=in_(WARPS))
    #: Programs of each multiprocessor, that take one tile after the other; 0: a program for each tile.
    programs: int = attrs.field(default=0, validator=[instance_of(int), ge(0), le(MOST_PROGRAMS)])
    #: Columns of a tile of rows that are read twice; 0: whole rows are held in registers.
    block: int = attrs.field(default=0, validator=in_(BLOCKS))


@attrs.frozen
class BackwardConfig:
    """How rows are divided among programs, and how each program is run."""

    #: Rows of a tile.
    rows: int = attrs.field(default=1, validator=in_(tuple(1 << power for power in range(13))))
    num_warps: int = attrs.field(default=8, validator=in_(WARPS))
    #: Programs of each multiprocessor, that take one tile after the other.
    programs: int = attrs.field(default=2, validator=[instance_of(int), ge(1), le(MOST_PROGRAMS)])
    #: Columns of a tile of rows that are read twice; 0: whole rows are held in registers.
    block: int = attrs.field(default=0, validator=in_(BLOCKS))
    #: Columns that a program of a second kernel has of many rows; 0: a program has whole rows, and holds at least the
    #: sums over its rows in registers.
    columns: int = attrs.field(default=0, validator=in_((0, 64, 128, 256, 512)))
