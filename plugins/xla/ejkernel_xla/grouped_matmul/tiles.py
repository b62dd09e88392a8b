"""Products of groups, tile by tile: every tile has rows of one group, so nothing is multiplied in vain but what a last
tile has too many. Which tiles there are depends on values, so they are visited by loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel_ops.grouped_matmul.axes import result_dtype
from ejkernel_ops.grouped_matmul.definition import activated, arithmetic_dtype
from ejkernel_ops.grouped_matmul.groups import boundaries

Arguments = Mapping[str, Any]

#: The fewest and the most rows of a tile that the heuristic takes.
FEWEST, MOST = 16, 512
#: The most rows of a tile: the places in the last one are counted in 32 bits.
LARGEST = 1 << 20
PRECISIONS = {
    None: lax.Precision.HIGHEST,
    "high": lax.Precision.HIGH,
    "default": lax.Precision.DEFAULT,
}


def rows_of_a_group(rows: int, groups: int) -> int:
    """The rows of an average group, as the next power of two, within limits.

    >>> rows_of_a_group(1000, 10)
    128
    """
    average = max(rows // groups, 1)
    return min(max(1 << (average - 1).bit_length(), FEWEST), MOST)


def neighbours(rows: int) -> tuple[int, int, int]:
    """Numbers of rows that are worth measuring, these first."""
    return rows, 2 * rows, max(rows // 2, 1)


def forward(arguments: Arguments, tile_rows: int) -> jax.Array:
    """The result, with zeros in rows of no group."""
    lhs, rhs, bias = arguments["lhs"], arguments["rhs"], arguments["rhs_bias"]
    dtype, wide = result_dtype(arguments), arithmetic_dtype(lhs)
    columns = rhs.shape[1 if arguments["transpose_rhs"] else 2]
    contracted = (((1,), (1 if arguments["transpose_rhs"] else 0,)), ((), ()))
    starts = boundaries(arguments)
    out = jnp.zeros((lhs.shape[0], columns if arguments["activation"] is None else columns // 2), dtype)
    if not out.size:
        return out

    def add_group(group: Any, out: jax.Array) -> jax.Array:
        matrix = lax.dynamic_index_in_dim(rhs, group, keepdims=False)

        def add_tile(tile: Tile, out: jax.Array) -> jax.Array:
            hidden = lax.dot_general(tile.of(lhs), matrix, contracted, **_product(arguments))
            if bias is not None:
                hidden += lax.dynamic_index_in_dim(bias, group, keepdims=False).astype(wide)
            return tile.updated(out, activated(hidden, arguments).astype(dtype))

        return _over_tiles(starts[group], starts[group + 1], lhs.shape[0], tile_rows, add_tile, out)

    result: jax.Array = lax.fori_loop(0, rhs.shape[0], add_group, out)
    return result


def d_rhs(arguments: Arguments, tile_rows: int) -> jax.Array:
    """The gradient of ``rhs``, which is 0 for an empty group."""
    lhs, d_out, starts = arguments["lhs"], arguments["d_out"], arguments["boundaries"]
    first, second = (d_out, lhs) if arguments["transpose_rhs"] else (lhs, d_out)
    zeros = jnp.zeros((first.shape[1], second.shape[1]), arithmetic_dtype(lhs))

    def product(group: Any) -> jax.Array:
        def add_tile(tile: Tile, total: jax.Array) -> jax.Array:
            rows = tile.own(first), tile.own(second)
            return total + lax.dot_general(*rows, (((0,), (0,)), ((), ())), **_product(arguments))

        total = _over_tiles(starts[group], starts[group + 1], lhs.shape[0], tile_rows, add_tile, zeros)
        return total.astype(result_dtype(arguments))

    gradient: jax.Array = lax.map(product, jnp.arange(starts.shape[0] - 1, dtype=jnp.int32))
    return gradient


class Tile:
    """Rows of one group. At the end of the arrays it begins earlier, and its first rows belong to others."""

    def __init__(self, row: Any, end: Any, rows: int, tile_rows: int) -> None:
        self.rows = min(tile_rows, rows)
        self.first = jnp.minimum(row, rows - self.rows)
        places = self.first + jnp.arange(self.rows, dtype=jnp.int32)
        self.is_own = ((places >= row) & (places < end))[:, None]

    def of(self, array: jax.Array) -> jax.Array:
        """Its rows of an array."""
        return lax.dynamic_slice_in_dim(array, self.first, self.rows)

    def own(self, array: jax.Array) -> jax.Array:
        """Its rows of an array, with zeros in those of others."""
        return jnp.where(self.is_own, self.of(array), jnp.zeros((), array.dtype))

    def updated(self, array: jax.Array, values: jax.Array) -> jax.Array:
        """The array with these values in the rows of its group."""
        return lax.dynamic_update_slice_in_dim(array, jnp.where(self.is_own, values, self.of(array)), self.first, 0)


def _over_tiles(
    start: Any, end: Any, rows: int, tile_rows: int, add: Callable[[Tile, jax.Array], jax.Array], value: jax.Array
) -> jax.Array:
    """The value after all tiles from one row to another."""
    if not rows:
        return value

    def step(state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        row, value = state
        return row + tile_rows, add(Tile(row, end, rows, tile_rows), value)

    return lax.while_loop(lambda state: state[0] < end, step, (start, value))[1]


def _product(arguments: Arguments) -> dict[str, Any]:
    wide = arithmetic_dtype(arguments["lhs"])
    # Products of narrow floats are exact in float32, whatever the precision.
    is_wide = arguments["lhs"].dtype == wide
    precision = PRECISIONS[arguments["precision"]] if is_wide else lax.Precision.DEFAULT
    return {"precision": precision, "preferred_element_type": wide}
