"""One pass over the logits of rows: tiles of them are made, folded into a few numbers for each row, and forgotten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas_tpu.fused_linear_cross_entropy._operands import bias_row, by_blocks, matrix
from ejkernel_pallas_tpu.grouped_matmul._tiles import LANES, Tile, keep, product
from ejkernel_pallas_tpu.launch import Launch, Operand, Output, Scratch, grid_indices

Arguments = Mapping[str, Any]
#: The largest number that an option becomes the inverse of.
LARGEST = 3.0e38


class Piece(NamedTuple):
    """As many logits of some rows as a register has lanes."""

    logits: jax.Array
    #: Their columns in the array of all logits.
    columns: jax.Array
    #: Which of them are columns that there are, or None for all. Others are -inf.
    is_column: jax.Array | None


class Fold(Protocol):
    """What becomes of the logits of a row. Each lane has numbers of its own until the end, so that no lane waits for
    another one before the row is complete.
    """

    @property
    def results(self) -> int:
        """How many numbers a row has at the end."""

    def scratch(self, rows: int) -> Mapping[str, Scratch]:
        """What is kept for the rows of a tile, one row for each of them."""

    def start(self, refs: Any) -> None:
        """Make it that of rows without logits."""

    def add(self, refs: Any, rows: Any, pieces: Sequence[Piece], is_first: Any) -> None:
        """Add logits of these rows. ``is_first`` says whether they are the first ones."""

    def finish(self, refs: Any, rows: Any) -> Sequence[jax.Array]:
        """The numbers of these rows, each (rows, 1) in float32."""


def over_logits(inv: Arguments, tile: Tile, fold: Fold, labels: jax.Array | None) -> Launch:
    """The launch that gives (row tiles, results, rows of a tile), by a step for each tile of the product.

    ``labels`` are columns in float32, which holds all of them, for folds with "labels" in their scratch.
    """
    is_transposed, last_k = inv["transpose_weight"], tile.depth_tiles - 1
    rest_of_depth = tile.all_depth - last_k * tile.depth
    rest_of_columns = tile.all_columns % tile.columns
    chunks = tile.rows // tile.chunk

    def kernel(refs: Any) -> None:
        j, k = grid_indices(3)[1:]

        @pl.when((j == 0) & (k == 0))
        def _() -> None:
            fold.start(refs)
            if labels is not None:
                for rows in squares(tile.rows):
                    refs.label_column[rows] = from_lanes(refs.labels, rows, 0).astype(jnp.int32)

        def work(rows: Any, is_rest: bool, has_end: bool) -> None:
            """Multiply these rows; after the last entries, fold their logits. ``has_end`` says that the tile has
            columns behind the last one.
            """
            x, y = refs.hidden[rows, :], refs.weight[...]
            if is_rest:  # what is behind the end of an array may be anything
                x = keep(lax.broadcasted_iota(jnp.int32, (1, tile.depth), 1) < rest_of_depth, x)
                shape = (1, tile.depth) if is_transposed else (tile.depth, 1)
                y = keep(lax.broadcasted_iota(jnp.int32, shape, int(is_transposed)) < rest_of_depth, y)
            total = product(x, y, (1, int(is_transposed)), None)
            if last_k:
                total = jnp.where(k == 0, 0.0, refs.sums[rows, :]) + total
                refs.sums[rows, :] = total

            def add() -> None:
                logits = total if inv["bias"] is None else total + refs.bias[...]
                fold.add(refs, rows, _pieces(after_options(logits, inv), j, tile, has_end), j == 0)

            pl.when(k == last_k)(add) if last_k else add()

        def each(is_rest: bool, has_end: bool) -> None:
            for_each_chunk(chunks, tile.chunk, lambda rows: work(rows, is_rest, has_end))

        # Masks of both ends are in programs of their own.
        is_end = j == tile.column_tiles - 1
        if rest_of_depth == tile.depth:
            _either(rest_of_columns, is_end, lambda has_end: each(False, has_end))
        else:
            pl.when(k < last_k)(lambda: each(False, False))
            pl.when(k == last_k)(lambda: _either(rest_of_columns, is_end, lambda has_end: each(True, has_end)))

        @pl.when((j == tile.column_tiles - 1) & (k == last_k))
        def _() -> None:
            for rows in squares(tile.rows):
                for place, number in enumerate(fold.finish(refs, rows)):
                    refs.numbers[place : place + 1, rows] = into_lanes(number, rows.size)

    of_labels = {} if labels is None else {"labels": by_blocks([labels], tile)}
    scratch = {} if labels is None else {"label_column": Scratch((tile.rows, LANES), "int32")}
    return Launch(
        name="fold_logits",
        kernel=kernel,
        grid=(tile.row_tiles, tile.column_tiles, tile.depth_tiles),
        semantics=("parallel", "arbitrary", "arbitrary"),
        tile_map=lambda i, j, k: (i, j, k),
        operands={
            "hidden": Operand(inv["hidden"], (tile.rows, tile.depth), lambda i, j, k: (i, k)),
            "weight": matrix(inv["weight"], tile, is_transposed),
            **({} if inv["bias"] is None else {"bias": bias_row(inv["bias"], tile)}),
            **of_labels,
        },
        outputs={
            "numbers": Output(
                (tile.row_tiles, fold.results, tile.rows),
                jnp.float32,
                (None, fold.results, tile.rows),
                lambda i, j, k: (i, 0, 0),
            )
        },
        scratch={
            **scratch,
            **({"sums": Scratch((tile.rows, tile.columns))} if last_k else {}),
            **fold.scratch(tile.rows),
        },
    )


def after_options(logits: jax.Array, inv: Arguments) -> jax.Array:
    """The logits after the cap, divided by the temperature."""
    cap, temperature = inv["logits_soft_cap"], inv.get("temperature", 1.0)
    if cap is not None:
        logits = cap * jnp.tanh(logits * min(1 / cap, LARGEST))
    return logits if temperature == 1.0 else logits * min(1 / temperature, LARGEST)


def _pieces(logits: jax.Array, j: Any, tile: Tile, has_end: bool) -> list[Piece]:
    pieces = []
    for start in range(0, tile.columns, LANES):
        part = logits[:, start : start + LANES]
        columns = j * tile.columns + start + lax.broadcasted_iota(jnp.int32, part.shape, 1)
        is_column = columns < tile.all_columns if has_end else None
        pieces.append(Piece(part if is_column is None else jnp.where(is_column, part, -jnp.inf), columns, is_column))
    return pieces


# -- steps and rows --------------------------------------------------------------------------------------------------


def _either(rest: int, is_end: Any, work: Any) -> None:
    """Run ``work(has_end)``, with True only in tiles at the end of the columns, if these have a rest."""
    if not rest:
        work(False)
        return
    pl.when(is_end)(lambda: work(True))
    pl.when(jnp.logical_not(is_end))(lambda: work(False))


def for_each_chunk(count: int, size: int, work: Any) -> None:
    """Call ``work`` with the rows of each chunk."""
    if count == 1:  # which may not be a multiple of what a register has
        work(pl.ds(0, size))
        return

    def step(i: Any, _: None) -> None:
        work(pl.ds(pl.multiple_of(i * size, size), size))

    lax.fori_loop(0, count, step, None)


def squares(rows: int) -> list[Any]:
    """The rows of a tile, as many at a time as a register has lanes."""
    return [pl.ds(start, min(LANES, rows)) for start in range(0, rows, LANES)]


def into_lanes(column: jax.Array, rows: int) -> jax.Array:
    """(rows, 1) as (1, rows): numbers of rows are side by side in main memory; alone in a row, each takes 512 bytes."""
    return jnp.where(_diagonal(rows), column, 0.0).sum(0, keepdims=True)[:, :rows]


def from_lanes(numbers: Any, rows: Any, place: int) -> jax.Array:
    """Numbers of rows that are side by side, as (rows, lanes), the same in all lanes."""
    row = numbers[place : place + 1, rows]
    column = jnp.where(_diagonal(rows.size)[:, : rows.size], row, 0.0).sum(1, keepdims=True)
    return jnp.broadcast_to(column, (rows.size, LANES))


def _diagonal(rows: int) -> jax.Array:
    row, lane = (lax.broadcasted_iota(jnp.int32, (rows, LANES), axis) for axis in (0, 1))
    return row == lane
