"""The arrays of the logits in blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_pallas_tpu.grouped_matmul._tiles import Tile
from ejkernel_pallas_tpu.launch import Operand


def in_rows(inv: Invocation) -> dict[str, Any]:
    """The arguments, with all rows in one axis."""
    hidden = inv["hidden"]
    return {**inv, "hidden": hidden.reshape(math.prod(hidden.shape[:-1]), hidden.shape[-1])}


def filled_up(arguments: dict[str, Any], tile: Tile) -> dict[str, Any]:
    """The arguments, with columns of zeros behind a vocabulary of less than a tile: registers are read whole."""
    missing = tile.columns - tile.all_columns
    if missing <= 0:
        return arguments
    axis = 0 if arguments["transpose_weight"] else 1
    widths = [(0, missing if place == axis else 0) for place in range(2)]
    bias = arguments["bias"]
    return {
        **arguments,
        "weight": jnp.pad(arguments["weight"], widths),
        "bias": None if bias is None else jnp.pad(bias, (0, missing)),
    }


def without_filling(gradient: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The gradient of the weight, from that of the one that was filled up."""
    return gradient[: shape[0], : shape[1]]


def matrix(weight: jax.Array, tile: Tile, is_transposed: bool) -> Operand:
    """The weight, in tiles."""
    if is_transposed:
        return Operand(weight, (tile.columns, tile.depth), lambda i, j, k: (j, k))
    return Operand(weight, (tile.depth, tile.columns), lambda i, j, k: (k, j))


def bias_row(bias: jax.Array, tile: Tile) -> Operand:
    """The bias in float32, a row beside each tile of columns."""
    return Operand(bias.astype(jnp.float32)[None, :], (1, tile.columns), lambda i, j, k: (0, j))


def by_blocks(numbers: Sequence[jax.Array], tile: Tile) -> Operand:
    """A few numbers for each row. Those of neighbouring rows are in neighbouring lanes."""
    behind = tile.row_tiles * tile.rows - tile.all_rows
    padded = jnp.pad(jnp.stack(numbers), ((0, 0), (0, behind))).reshape(-1, tile.row_tiles, tile.rows)
    return Operand(padded.transpose(1, 0, 2), (None, len(numbers), tile.rows), lambda i, j, k: (i, 0, 0))


def of_rows(numbers: jax.Array, tile: Tile) -> list[jax.Array]:
    """The results of a pass over the logits: one array (rows,) for each number."""
    by_number = numbers.transpose(1, 0, 2).reshape(numbers.shape[1], -1)
    return list(by_number[:, : tile.all_rows])
