"""The product of each group of rows with its matrix: a matrix stays while the rows of its group go by."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_core import Invocation
from ejkernel_pallas_tpu.grouped_matmul._tiles import Tile, for_each_chunk, keep, product
from ejkernel_pallas_tpu.grouped_matmul._visits import Visits
from ejkernel_pallas_tpu.launch import Launch, Operand, Output, Scratch, grid_indices


def multiply(inv: Invocation, tile: Tile, visits: Visits, dtype: Any, is_gated: bool) -> Launch:
    """The launch. Columns are those of the result: with ``is_gated``, each has a gate and a value in the matrices."""
    lhs, rhs, bias, is_transposed = inv["lhs"], inv["rhs"], inv["rhs_bias"], inv["transpose_rhs"]
    parts = ("gate", "value") if is_gated else ("only",)
    last = tile.depth_tiles - 1
    rest = tile.all_depth - last * tile.depth

    def tile_map(j: Any, visit: Any, k: Any, table: Any) -> tuple[Any, ...]:
        number = {name: visits.read(table, name, visit) for name in ("tile", "source", "group", "start", "end")}
        # A visit without rows fetches nothing.
        k = jnp.where(number["start"] < number["end"], k, last)
        return number["tile"], number["source"], number["group"], j, k

    def kernel(table: Any, refs: Any) -> None:
        visit, k = grid_indices(3)[1:]
        start, end = (visits.read(table, name, visit) for name in ("start", "end"))
        is_last = k == last

        @pl.when((visits.read(table, "first", visit) != 0) & is_last & (end - start < tile.rows))
        def _() -> None:
            refs.out[...] = jnp.zeros((tile.rows, tile.columns), dtype)

        def add(rows: Any, mask: Any, is_rest: bool) -> None:
            """Add the products of these rows, and write the result after the last ones."""
            sums = []
            for part in parts:
                x, y = refs.lhs[rows, :], getattr(refs, f"rhs_{part}")[...]
                if is_rest:  # what is behind the end of an array may be anything
                    x = keep(lax.broadcasted_iota(jnp.int32, (1, tile.depth), 1) < rest, x)
                    shape = (1, tile.depth) if is_transposed else (tile.depth, 1)
                    y = keep(lax.broadcasted_iota(jnp.int32, shape, int(is_transposed)) < rest, y)
                total = product(x, y, (1, int(is_transposed)), inv["precision"])
                if last:
                    kept = getattr(refs, f"sums_{part}")
                    total = jnp.where(k == 0, 0.0, kept[rows, :]) + total
                    kept[rows, :] = total
                sums.append(total)

            def write() -> None:
                hidden = [
                    total if bias is None else total + getattr(refs, f"bias_{part}")[...].astype(jnp.float32)
                    for part, total in zip(parts, sums, strict=True)
                ]
                result = gated(inv["activation"], *hidden) if is_gated else hidden[0]
                others = refs.out[rows, :].astype(jnp.float32)
                refs.out[rows, :] = jnp.where(mask, result, others).astype(dtype)

            pl.when(is_last)(write) if last else write()

        def each(is_rest: bool) -> None:
            for_each_chunk(tile, start, end, lambda rows, mask: add(rows, mask, is_rest))

        if rest == tile.depth:
            each(False)
        else:
            pl.when(is_last)(lambda: each(True))
            pl.when(jnp.logical_not(is_last))(lambda: each(False))

    operands = {"lhs": Operand(lhs, (tile.rows, tile.depth), lambda i, source, group, j, k: (source, k))}
    for offset, part in enumerate(parts):
        operands[f"rhs_{part}"] = _matrices(rhs, tile, is_transposed, offset * tile.column_tiles)
        if bias is not None:
            operands[f"bias_{part}"] = _biases(bias, tile, offset * tile.column_tiles)
    shape = (tile.all_rows, tile.all_columns)
    return Launch(
        name="multiply_groups",
        kernel=kernel,
        grid=(tile.column_tiles, visits.count, tile.depth_tiles),
        semantics=("parallel", "arbitrary", "arbitrary"),
        tile_map=tile_map,
        operands=operands,
        outputs={"out": Output(shape, dtype, (tile.rows, tile.columns), lambda i, source, group, j, k: (i, j))},
        scratch={f"sums_{part}": Scratch((tile.rows, tile.columns)) for part in parts} if last else {},
    )


def _matrices(rhs: Any, tile: Tile, is_transposed: bool, offset: int) -> Operand:
    if is_transposed:
        return Operand(rhs, (None, tile.columns, tile.depth), lambda i, source, group, j, k: (group, j + offset, k))
    return Operand(rhs, (None, tile.depth, tile.columns), lambda i, source, group, j, k: (group, k, j + offset))


def _biases(bias: Any, tile: Tile, offset: int) -> Operand:
    rows = bias[:, None, :]
    return Operand(rows, (None, 1, tile.columns), lambda i, source, group, j, k: (group, 0, j + offset))


def gated(activation: str, gate: jax.Array, value: jax.Array) -> jax.Array:
    """A gated activation of gates and values in arrays of their own."""
    return (jax.nn.silu(gate) if activation == "silu_gated" else jax.nn.gelu(gate, approximate=True)) * value
