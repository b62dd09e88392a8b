"""The gradients of a call: the logits of each tile once more, their gradient, and its products, in vector memory.

One kernel keeps rows, and sums their gradient over the vocabulary; another one keeps words, and sums theirs over rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel_pallas_tpu.fused_linear_cross_entropy._logits import (
    LARGEST,
    after_options,
    for_each_chunk,
    from_lanes,
    squares,
)
from ejkernel_pallas_tpu.fused_linear_cross_entropy._operands import bias_row, by_blocks, matrix
from ejkernel_pallas_tpu.grouped_matmul._tiles import LANES, Tile, keep, product
from ejkernel_pallas_tpu.launch import Launch, Operand, Output, Scratch, grid_indices

Arguments = Mapping[str, Any]
#: What a row has for the gradient of its logits: the largest one; the factors of the exponential, of the label and of
#: every word; the column of the label, or -1; and 1 if the row has a part in the gradients, else 0.
NUMBERS = ("top", "of_exponential", "of_label", "of_word", "label", "is_active")


def over_words(inv: Arguments, tile: Tile, numbers: Mapping[str, jax.Array], dtype: Any) -> Launch:
    """The launch that gives the gradient of the hidden states."""
    is_transposed, last = inv["transpose_weight"], tile.column_tiles - 1
    chunks = tile.rows // tile.chunk

    def kernel(refs: Any) -> None:
        j = grid_indices(2)[1]

        @pl.when(j == 0)
        def _() -> None:
            refs.sums[...] = jnp.zeros((tile.rows, tile.depth), jnp.float32)
            _into_columns(refs, tile)

        def work(rows: Any, has_end: bool) -> None:
            weight = refs.weight[...]
            if has_end:  # what is behind the last word may be anything
                weight = keep(_is_word(weight.shape, 0 if is_transposed else 1, j, tile), weight)
            gradient = _d_logits(inv, refs, tile, refs.hidden[rows, :], weight, rows, j, has_end)
            sums = product(gradient.astype(weight.dtype), weight, (1, 0 if is_transposed else 1), None)
            refs.sums[rows, :] += sums

        _for_each(tile, j, lambda has_end: for_each_chunk(chunks, tile.chunk, lambda rows: work(rows, has_end)))

        @pl.when(j == last)
        def _() -> None:
            refs.out[...] = refs.sums[...].astype(dtype)

    return Launch(
        name="gradient_of_rows",
        kernel=kernel,
        grid=(tile.row_tiles, tile.column_tiles),
        semantics=("parallel", "arbitrary"),
        tile_map=lambda i, j: (i, j, 0),
        operands=_operands(inv, tile, numbers),
        outputs={"out": Output(inv["hidden"].shape, dtype, (tile.rows, tile.depth), lambda i, j, k: (i, 0))},
        scratch={"sums": Scratch((tile.rows, tile.depth)), **_columns(tile)},
    )


def over_rows(inv: Arguments, tile: Tile, numbers: Mapping[str, jax.Array], dtype: Any, has_weight: bool) -> Launch:
    """The launch that gives the gradient of the bias, (1, vocab) in float32, and that of the weight if it is needed."""
    is_transposed, last = inv["transpose_weight"], tile.row_tiles - 1
    sides = (tile.columns, tile.depth) if is_transposed else (tile.depth, tile.columns)
    chunks = tile.rows // tile.chunk

    def kernel(refs: Any) -> None:
        j, i = grid_indices(2)

        @pl.when(i == 0)
        def _() -> None:
            refs.bias_sums[...] = jnp.zeros((1, tile.columns), jnp.float32)
            if has_weight:
                refs.sums[...] = jnp.zeros(sides, jnp.float32)

        _into_columns(refs, tile)

        def work(rows: Any, has_end: bool) -> None:
            # Rows without a part, and those behind the last one, may hold anything.
            hidden = keep(refs.columns[NUMBERS.index("is_active"), rows, :][:, :1] != 0, refs.hidden[rows, :])
            gradient = _d_logits(inv, refs, tile, hidden, refs.weight[...], rows, j, has_end)
            refs.bias_sums[...] += gradient.sum(0, keepdims=True)
            if has_weight:
                first, second = (gradient.astype(hidden.dtype), hidden)
                first, second = (first, second) if is_transposed else (second, first)
                refs.sums[...] += product(first, second, (0, 0), None)

        _for_each(tile, j, lambda has_end: for_each_chunk(chunks, tile.chunk, lambda rows: work(rows, has_end)))

        @pl.when(i == last)
        def _() -> None:
            refs.bias_out[...] = refs.bias_sums[...]
            if has_weight:
                refs.out[...] = refs.sums[...].astype(dtype)

    operand = matrix(inv["weight"], tile, is_transposed)
    words = inv["weight"].shape[0 if is_transposed else 1]
    of_weight = {"out": Output(inv["weight"].shape, dtype, operand.block, operand.index_map)} if has_weight else {}
    of_bias = Output((1, words), jnp.float32, (1, tile.columns), lambda i, j, k: (0, j))
    return Launch(
        name="gradient_of_words",
        kernel=kernel,
        grid=(tile.column_tiles, tile.row_tiles),
        semantics=("parallel", "arbitrary"),
        tile_map=lambda j, i: (i, j, 0),
        operands=_operands(inv, tile, numbers),
        outputs={"bias_out": of_bias, **of_weight},
        scratch={
            "bias_sums": Scratch((1, tile.columns)),
            **({"sums": Scratch(sides)} if has_weight else {}),
            **_columns(tile),
        },
    )


def _operands(inv: Arguments, tile: Tile, numbers: Mapping[str, jax.Array]) -> dict[str, Operand]:
    return {
        "hidden": Operand(inv["hidden"], (tile.rows, tile.depth), lambda i, j, k: (i, 0)),
        "weight": matrix(inv["weight"], tile, inv["transpose_weight"]),
        "numbers": by_blocks([numbers[name] for name in NUMBERS], tile),
        **({} if inv["bias"] is None else {"bias": bias_row(inv["bias"], tile)}),
    }


# -- the gradient of the logits ----------------------------------------------------------------------------------------


def _d_logits(
    inv: Arguments, refs: Any, tile: Tile, hidden: Any, weight: Any, rows: Any, j: Any, has_end: bool
) -> jax.Array:
    """The gradient of the logits of a chunk before the cap, in float32; 0 behind the last word, and in rows without a
    part.
    """
    logits = product(hidden, weight, (1, int(inv["transpose_weight"])), None)
    logits = after_options(logits if inv["bias"] is None else logits + refs.bias[...], inv)
    row = dict(zip(NUMBERS, (refs.columns[place, rows, :] for place in range(len(NUMBERS))), strict=True))
    cap = inv["logits_soft_cap"]
    parts: list[jax.Array] = []
    for start in range(0, tile.columns, LANES):
        x = logits[:, start : start + LANES]
        columns = j * tile.columns + start + lax.broadcasted_iota(jnp.int32, x.shape, 1)
        part = jnp.exp(x - row["top"]) * row["of_exponential"] - row["of_word"]
        part -= jnp.where(columns == row["label"].astype(jnp.int32), row["of_label"], 0.0)
        if cap is not None:
            part *= 1 - jnp.square(x * min(1 / cap, LARGEST))
        is_part = row["is_active"] != 0
        parts.append(jnp.where(is_part & (columns < tile.all_columns) if has_end else is_part, part, 0.0))
    gradient: jax.Array = jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
    return gradient


def _columns(tile: Tile) -> dict[str, Scratch]:
    """The numbers of the rows of a tile, each the same in all lanes."""
    return {"columns": Scratch((len(NUMBERS), tile.rows, LANES))}


def _into_columns(refs: Any, tile: Tile) -> None:
    for rows in squares(tile.rows):
        for place in range(len(NUMBERS)):
            refs.columns[place, rows, :] = from_lanes(refs.numbers, rows, place)


def _is_word(shape: tuple[int, ...], axis: int, j: Any, tile: Tile) -> Any:
    mask = tuple(size if place == axis else 1 for place, size in enumerate(shape))
    return j * tile.columns + lax.broadcasted_iota(jnp.int32, mask, axis) < tile.all_columns


def _for_each(tile: Tile, j: Any, work: Any) -> None:
    """Run ``work(has_end)``, with True in tiles that have columns behind the last word."""
    if tile.all_columns % tile.columns == 0:
        work(False)
        return
    is_end = j == tile.column_tiles - 1
    pl.when(is_end)(lambda: work(True))
    pl.when(jnp.logical_not(is_end))(lambda: work(False))
