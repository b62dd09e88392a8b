"""The backward pass for the gradient of a bias, which may broadcast along any of its axes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_ops.flash_attention.statistics import BackwardRows
from ejkernel_pallas_tpu.flash_attention._backward import all_operands
from ejkernel_pallas_tpu.flash_attention._problem import Arguments, Problem
from ejkernel_pallas_tpu.flash_attention._scalars import read_entry
from ejkernel_pallas_tpu.flash_attention._steps import PairTable
from ejkernel_pallas_tpu.flash_attention._tile import logit_gradients, tile_shape
from ejkernel_pallas_tpu.launch import Launch, Output, Scratch, grid_indices


def bias_pass(a: Arguments, p: Problem, rows: BackwardRows, pairs: PairTable) -> Launch:
    """The launch that computes the gradient: (batch, heads, queries, keys), with 1 for an axis that the bias lacks.

    There are two exceptions. Where the bias has no axis of keys, but one of queries, the last two axes are
    (1, queries). Where it has neither, they are (1, keys), and the caller sums over keys.

    The grid has four axes: batch, heads, blocks of queries and blocks of keys. Those that the bias has come first, and
    those that are summed over come last, so that each sum is finished before the next one begins.
    """
    has_axis = (a["bias"].shape[0] > 1, a["bias"].shape[1] > 1, p.bias != "keys", p.bias != "queries")
    grid_axes = sorted(range(4), key=lambda axis: not has_axis[axis])
    counts = (p.batch, p.heads, p.q_count, p.k_count)
    is_transposed = p.bias == "queries"

    def output_tile_map(*indices: Any) -> tuple[Any, Any, Any, Any]:
        b, h, i, j = (indices[grid_axes.index(axis)] for axis in range(4))
        return b, h, i, j

    def tile_map(*indices: Any) -> tuple[Any, Any, Any, Any]:
        # Nothing is fetched for a pair that is not visible: its word has the nearest visible key block, which stays.
        b, h, i, j = output_tile_map(*indices)
        return b, h, i, pairs.word(indices[4], b, i, j) >> 1

    def index_map(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
        index = [x if is_present else 0 for x, is_present in zip((b, h, i, j), has_axis, strict=True)]
        return (*index[:2], 0, index[2]) if is_transposed else tuple(index)

    padded_sizes = (p.batch, p.heads, p.q_count * p.q_block, p.k_count * p.k_block)
    shape = [size if is_present else 1 for size, is_present in zip(padded_sizes, has_axis, strict=True)]
    block = {"full": (p.q_block, p.k_block), "keys": (1, p.k_block), "queries": (1, p.q_block)}[str(p.bias)]
    return Launch(
        name="flash_attention_bwd_bias",
        kernel=lambda table, numbers, refs: _sum_into_bias(p, pairs, has_axis, grid_axes, table, numbers, refs),
        grid=tuple(counts[axis] for axis in grid_axes),
        semantics=tuple("parallel" if has_axis[axis] else "arbitrary" for axis in grid_axes),
        tile_map=tile_map,
        operands=all_operands(a, p, rows),
        outputs={
            "d_bias": Output(
                (*shape[:2], 1, shape[2]) if is_transposed else tuple(shape),
                jnp.dtype(jnp.float32),
                (None, None, *block),
                index_map,
            )
        },
        scratch={"sums": Scratch(tile_shape(p, is_transposed))},
        output_tile_map=output_tile_map,
    )


def _sum_into_bias(
    p: Problem, pairs: PairTable, has_axis: tuple[bool, ...], grid_axes: list[int], table: Any, numbers: Any, refs: Any
) -> None:
    indices, counts = grid_indices(4), (p.batch, p.heads, p.q_count, p.k_count)
    b, h, i, j = (indices[grid_axes.index(axis)] for axis in range(4))
    is_transposed = p.bias == "queries"
    # Of the steps that are summed into one tile.
    is_first = is_last = jnp.bool_(True)
    for axis, index in enumerate((b, h, i, j)):
        if not has_axis[axis]:
            is_first = jnp.logical_and(is_first, index == 0)
            is_last = jnp.logical_and(is_last, index == counts[axis] - 1)
    is_visible = (pairs.word(table, b, i, j) & 1) != 0

    @pl.when(is_first)
    def _() -> None:
        refs.sums[...] = jnp.zeros(tile_shape(p, is_transposed), jnp.float32)

    @pl.when(is_visible)
    def _() -> None:
        entry = read_entry(p, numbers, b)
        _, _, d_logits = logit_gradients(p, refs, entry, b * p.heads + h, i, j, True, is_transposed)
        refs.sums[...] += d_logits

    @pl.when(is_last)
    def _() -> None:
        sums = refs.sums[...]
        refs.d_bias[...] = sums if p.bias == "full" else jnp.sum(sums, axis=0, keepdims=True)
