"""The gradient of the matrices: the product of two arrays, contracted over the rows of each group."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_core import Invocation
from ejkernel_pallas_tpu.grouped_matmul._tiles import Tile, for_each_chunk, keep, product
from ejkernel_pallas_tpu.grouped_matmul._visits import Visits
from ejkernel_pallas_tpu.launch import Launch, Operand, Output, Scratch, grid_indices


def contract(inv: Invocation, tile: Tile, visits: Visits, dtype: Any, groups: int) -> Launch:
    """The launch. A tile of a matrix stays while the rows of its group go by, and is the sum of their products."""
    first, second = (inv["d_out"], inv["lhs"]) if inv["transpose_rhs"] else (inv["lhs"], inv["d_out"])

    def tile_map(i: Any, j: Any, visit: Any, table: Any) -> tuple[Any, ...]:
        return visits.read(table, "group", visit), visits.read(table, "source", visit), i, j

    def kernel(table: Any, refs: Any) -> None:
        visit = grid_indices(3)[2]
        start, end = (visits.read(table, name, visit) for name in ("start", "end"))

        @pl.when(visits.read(table, "first", visit) != 0)
        def _() -> None:
            refs.sums[...] = jnp.zeros((tile.depth, tile.columns), jnp.float32)

        def add(rows: Any, mask: Any) -> None:
            # In both, because what stands in other rows may be anything.
            x, y = (keep(mask, ref[rows, :]) for ref in (refs.first, refs.second))
            refs.sums[...] += product(x, y, (0, 0), inv["precision"])

        for_each_chunk(tile, start, end, add)

        @pl.when(visits.read(table, "last", visit) != 0)
        def _() -> None:
            refs.out[...] = refs.sums[...].astype(dtype)

    shape = (groups, tile.all_depth, tile.all_columns)
    return Launch(
        name="contract_groups",
        kernel=kernel,
        grid=(tile.depth_tiles, tile.column_tiles, visits.count),
        semantics=("parallel", "parallel", "arbitrary"),
        tile_map=tile_map,
        operands={
            "first": Operand(first, (tile.rows, tile.depth), lambda group, source, i, j: (source, i)),
            "second": Operand(second, (tile.rows, tile.columns), lambda group, source, i, j: (source, j)),
        },
        outputs={
            "out": Output(shape, dtype, (None, tile.depth, tile.columns), lambda group, source, i, j: (group, i, j))
        },
        scratch={"sums": Scratch((tile.depth, tile.columns))},
    )
