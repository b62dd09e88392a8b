"""The tiles of a call, and device code that the two kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax import lax

LANES = 128


@attrs.frozen
class Tile:
    """How many rows, columns (of n) and entries (of k) a tile has, and how many the arrays have."""

    rows: int
    columns: int
    depth: int
    #: The rows that are multiplied at a time.
    chunk: int
    all_rows: int
    all_columns: int
    all_depth: int

    @property
    def row_tiles(self) -> int:
        return -(-self.all_rows // self.rows)

    @property
    def column_tiles(self) -> int:
        return -(-self.all_columns // self.columns)

    @property
    def depth_tiles(self) -> int:
        return -(-self.all_depth // self.depth)


def for_each_chunk(tile: Tile, start: Any, end: Any, work: Callable[[Any, Any], None]) -> None:
    """Call ``work`` with each chunk that has rows from ``start`` to ``end``, and (chunk, 1) which of its rows are."""
    from jax.experimental import pallas as pl

    chunk = tile.chunk

    def step(i: Any, _: None) -> None:
        first = i * chunk if isinstance(i, int) else pl.multiple_of(i * chunk, chunk)
        row = first + lax.broadcasted_iota(jnp.int32, (chunk, 1), 0)
        work(pl.ds(first, chunk), (row >= start) & (row < end))

    if chunk == tile.rows:  # which may not be a multiple of what a register has
        pl.when(start < end)(lambda: step(0, None))
    else:
        lax.fori_loop(start // chunk, (end + chunk - 1) // chunk, step, None)


def keep(mask: Any, x: Any) -> Any:
    """``x`` where the mask is set, else 0. It is chosen in float32: the mask of 16 bits would have another layout."""
    return jnp.where(mask, x.astype(jnp.float32), 0.0).astype(x.dtype)


def product(x: Any, y: Any, axes: tuple[int, int], precision: str | None) -> jax.Array:
    """The product contracted over these axes, in float32.

    One pass of the matrix unit multiplies bfloat16 exactly. float32 takes six, but one for the precision "default".
    """
    is_exact = x.dtype == jnp.float32 and precision != "default"
    return lax.dot_general(
        x,
        y,
        (((axes[0],), (axes[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if is_exact else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
