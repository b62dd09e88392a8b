"""The tiles of the kernels for Hopper, and what they refuse."""

from __future__ import annotations

import math

import attrs
from attrs.validators import in_

from ejkernel_core import Invocation, Unsupported
from ejkernel_triton.gluon.requirements import DTYPES, ELEMENTS, require_hopper
from ejkernel_triton.grouped_matmul import _tiling

#: Rows of a tile for each of the two groups of warps, and of a tile.
HALF = 64
ROWS = 2 * HALF
#: How many products a step adds to each number of the result. So many 16-bit numbers are 128 bytes.
DEPTH = 64
#: By the columns of a tile: how many stages fit into shared memory. The first is best for products of rows: with fewer
#: stages programs are closer together, and find more of what they share in the L2. The last is best for the gradient.
STAGES = {256: (3, 4), 128: (4, 6)}
#: The rows of tiles of a band, the best for products of rows first.
BANDS = (8, 16, 2)
#: The tiles of a large matrix.
MANY_TILES = 256
#: The most groups of which a program lists the tiles.
MOST_GROUPS = 1022
#: By activation, how the columns of the gates and of the values are arranged.
GATES = {"silu_gated": "halves", "gelu_gated": "halves", "swiglu_oai": "pairs"}
#: The most rows of a matrix whose gradient is computed: the number of a row of tiles has 16 bits.
MOST_ROWS = ROWS << 16


@attrs.frozen
class Config:
    """The columns of the matrix in a tile, the stages in shared memory, and the tiles of rows of a band."""

    columns: int = attrs.field(default=256, validator=in_((128, 256)))
    stages: int = attrs.field(default=3, validator=in_((3, 4, 6)))
    band: int = attrs.field(default=8, validator=in_((1, 2, 4, 8, 16, 32)))


def check(inv: Invocation, groups: int, sizes: tuple[int, ...]) -> None:
    """Raise for a card, versions or arrays that the kernels do not support. ``sizes``: of the rows in memory."""
    _tiling.check(inv, groups)
    require_hopper(inv)
    dtype = str(inv["lhs"].dtype)
    if dtype not in DTYPES:
        raise Unsupported(f"the Gluon kernels take {' and '.join(DTYPES)}; not {dtype}")
    if groups > MOST_GROUPS:
        raise Unsupported(f"the Gluon kernels take up to {MOST_GROUPS} groups; there are {groups}")
    for size in sizes:
        if size % ELEMENTS or not size:
            raise Unsupported(f"the Gluon kernels take multiples of {ELEMENTS} for k and n; not {size}")
    if not inv["lhs"].shape[0]:
        raise Unsupported("the Gluon kernels take no arrays without rows")


def configs(columns: int) -> list[Config]:
    """Those for products of rows with matrices of so many columns, the best first."""
    width = 128 if columns <= 128 else 256
    return [Config(width, stages, band) for stages in STAGES[width] for band in BANDS]


def d_rhs_configs(k: int, n: int) -> list[Config]:
    """Those for the gradient of matrices of these sizes, the best first."""
    # Programs have most tiles of a small matrix at the same time, whatever the band.
    band = 16 if math.ceil(k / ROWS) * math.ceil(n / 256) >= MANY_TILES else 8
    return sorted(configs(n), key=lambda cfg: (-cfg.stages, cfg.band != band))


def check_config(cfg: Config) -> None:
    """Raise where the stages do not fit into shared memory."""
    if cfg.stages > max(STAGES[cfg.columns]):
        raise Unsupported(f"{cfg.stages} stages of {cfg.columns} columns do not fit into shared memory: take fewer")
