"""Which tiles: a table of shapes, and which of them fit a card.

A shape is (rows, columns, depth, warps, stages). Their order follows from the products that a byte of shared memory
serves, and the first of each table is within a few percent of the best in most calls on an H100 and an H200.
"""

from __future__ import annotations

import attrs
from attrs.validators import in_

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.calibration import get_shared_memory_limit
from ejkernel_triton.launch._cards import capability
from ejkernel_triton.launch._requirements import require_card

DTYPES = ("float16", "bfloat16", "float32")
SIZES = (16, 32, 64, 128, 256)
#: The most groups of which a program can find its own: their sizes are held in registers.
MOST_GROUPS = 4094
#: The shared memory that CUDA reserves on a multiprocessor, for cards whose limit is that of the data sheet.
RESERVED_BY_CUDA = {(8, 0): 1024}
PRECISIONS = {None: "ieee", "high": "tf32x3", "default": "tf32"}

Shape = tuple[int, int, int, int, int]
#: For 16 bits, the best first, for groups of many rows.
WIDE: tuple[Shape, ...] = (
    (128, 256, 64, 8, 3),
    (128, 128, 64, 8, 3),
    (64, 256, 64, 4, 3),
    (128, 64, 64, 4, 4),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 4),
)
#: For 16 bits and groups of few rows, which are read as fast as memory allows.
NARROW: tuple[Shape, ...] = (
    (16, 128, 128, 4, 4),
    (16, 64, 128, 4, 4),
    (16, 128, 64, 4, 5),
    (32, 128, 64, 4, 4),
    (32, 64, 128, 4, 4),
)
#: For float32, whose products do not use the matrix units.
FLOAT32: tuple[Shape, ...] = (
    (64, 64, 16, 4, 2),
    (32, 64, 32, 4, 2),
    (64, 64, 32, 8, 2),
    (32, 32, 32, 4, 2),
    (16, 64, 32, 4, 2),
)


@attrs.frozen
class Config:
    """The tile of a program, how it is run, and the rows of tiles of a band."""

    rows: int = attrs.field(default=128, validator=in_(SIZES))
    columns: int = attrs.field(default=128, validator=in_(SIZES))
    depth: int = attrs.field(default=64, validator=in_(SIZES))
    num_warps: int = attrs.field(default=8, validator=in_((1, 2, 4, 8, 16)))
    num_stages: int = attrs.field(default=3, validator=in_((1, 2, 3, 4, 5, 6)))
    band: int = attrs.field(default=8, validator=in_((1, 2, 4, 8, 16, 32)))


def check(inv: Invocation, groups: int) -> None:
    """Raise where this card, these versions, or these arrays are not for Triton."""
    require_card(inv)
    for name, array in inv.arguments.items():
        dtype = str(getattr(array, "dtype", ""))
        if dtype.startswith(("float", "bfloat")) and dtype not in DTYPES:
            raise Unsupported(f"the Triton kernels take {', '.join(DTYPES)}; {name} is {dtype}")
    if groups > MOST_GROUPS:
        raise Unsupported(f"the Triton kernels take up to {MOST_GROUPS} groups; there are {groups}")


def check_config(inv: Invocation, cfg: Config) -> None:
    """Raise where a configuration of the caller's does not fit the card."""
    needed, limit = shared_memory(inv, cfg), _limit(inv)
    if needed > limit:
        raise Unsupported(f"these tiles need {needed} bytes of shared memory, and there are {limit}: take smaller ones")


def configs(inv: Invocation, rows_of_a_group: int, sizes: tuple[int, int, int]) -> list[Config]:
    """Those that fit, the best first. ``sizes``: what the rows, the columns and the depth of a tile divide."""
    shapes = (*NARROW, *WIDE) if rows_of_a_group <= 32 else WIDE
    if inv["lhs"].dtype.itemsize == 4:
        shapes = FLOAT32
    all_configs = [Config(*_shortened(shape, sizes)) for shape in shapes]
    fits = [cfg for cfg in dict.fromkeys(all_configs) if shared_memory(inv, cfg) <= _limit(inv)]
    if fits:
        return fits
    smallest = min(all_configs, key=lambda cfg: shared_memory(inv, cfg))
    smallest = attrs.evolve(smallest, num_stages=1)
    check_config(inv, smallest)
    return [smallest]


def _shortened(shape: Shape, sizes: tuple[int, int, int]) -> Shape:
    """No longer than the call needs, and at least the least of matrix units."""
    tile = (
        min(block, max(16, 1 << max(size - 1, 0).bit_length())) for block, size in zip(shape[:3], sizes, strict=True)
    )
    rows, columns, depth = tile
    warps = shape[3] if (rows, columns) == shape[:2] else min(shape[3], max(1, rows * columns // 2048))
    return rows, columns, depth, warps, shape[4]


def shared_memory(inv: Invocation, cfg: Config) -> int:
    """The bytes of the tiles that a program has at a time."""
    columns = cfg.columns * (1 if inv.get("activation") is None else 2)
    operands = (cfg.rows + columns) * cfg.depth * inv["lhs"].dtype.itemsize
    return int(operands) * max(1, cfg.num_stages)


def _limit(inv: Invocation) -> int:
    own = capability(inv)
    limit = get_shared_memory_limit(compute_capability=own)
    return int(limit) - RESERVED_BY_CUDA.get(own or (0, 0), 0)
