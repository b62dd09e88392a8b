"""The gradient of a bias, whatever it was broadcast from."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas_tpu.flash_attention._backward import all_operands
from ejkernel_pallas_tpu.flash_attention._problem import Arguments, Problem
from ejkernel_pallas_tpu.flash_attention._rows import Rows
from ejkernel_pallas_tpu.flash_attention._sight import Plane
from ejkernel_pallas_tpu.flash_attention._tile import shape, slopes
from ejkernel_pallas_tpu.launch._launch import Launch, Output, ids


def into_bias(a: Arguments, p: Problem, rows: Rows, plane: Plane) -> Launch:
    """The launch that makes it: (batch, heads, queries, keys), an axis that it was broadcast over being 1.

    That of one number for all keys comes as a row of queries, and that of a single number as a row of keys. The grid
    has an axis for the batch, for heads, for blocks of queries and for blocks of keys: first those that stay apart,
    and behind them those that are added up, so that a sum is finished before the next one begins.
    """
    apart = (a["bias"].shape[0] > 1, a["bias"].shape[1] > 1, p.bias != "keys", p.bias != "queries")
    order = sorted(range(4), key=lambda axis: not apart[axis])
    counts = (p.batch, p.heads, p.q_count, p.k_count)
    turned = p.bias == "queries"

    def output_at(*places: Any) -> tuple[Any, Any, Any, Any]:
        b, h, i, j = (places[order.index(axis)] for axis in range(4))
        return b, h, i, j

    def at(*places: Any) -> tuple[Any, Any, Any, Any]:
        # What nobody sees is not fetched: the nearest block that somebody sees stays in its place.
        b, h, i, j = output_at(*places)
        return b, h, i, plane.word(places[4], b, i, j) >> 1

    def place(b: Any, h: Any, i: Any, j: Any) -> tuple[Any, ...]:
        at = [where if own else 0 for where, own in zip((b, h, i, j), apart, strict=True)]
        return (*at[:2], 0, at[2]) if turned else tuple(at)

    whole = (p.batch, p.heads, p.q_count * p.q_block, p.k_count * p.k_block)
    sizes = [size if own else 1 for size, own in zip(whole, apart, strict=True)]
    tile = {"full": (p.q_block, p.k_block), "keys": (1, p.k_block), "queries": (1, p.q_block)}[str(p.bias)]
    return Launch(
        name="flash_attention_bwd_bias",
        kernel=lambda table, seed, refs: _sum_into_bias(p, plane, apart, order, table, seed, refs),
        grid=tuple(counts[axis] for axis in order),
        semantics=tuple("parallel" if apart[axis] else "arbitrary" for axis in order),
        at=at,
        operands=all_operands(a, p, rows),
        outputs={
            "d_bias": Output(
                (*sizes[:2], 1, sizes[2]) if turned else tuple(sizes),
                jnp.dtype(jnp.float32),
                (None, None, *tile),
                place,
            )
        },
        scratch={"sums": shape(p, turned)},
        output_at=output_at,
    )


def _sum_into_bias(
    p: Problem, plane: Plane, apart: tuple[bool, ...], order: list[int], table: Any, seed: Any, refs: Any
) -> None:
    places, counts = ids(4), (p.batch, p.heads, p.q_count, p.k_count)
    b, h, i, j = (places[order.index(axis)] for axis in range(4))
    state, turned = seed[0], p.bias == "queries"
    first = last = jnp.bool_(True)
    for axis, where in zip(range(4), (b, h, i, j), strict=True):
        if not apart[axis]:
            first, last = jnp.logical_and(first, where == 0), jnp.logical_and(last, where == counts[axis] - 1)
    here = (plane.word(table, b, i, j) & 1) != 0

    @pl.when(first)
    def _() -> None:
        refs.sums[...] = jnp.zeros(shape(p, turned), jnp.float32)

    @pl.when(here)
    def _() -> None:
        _, _, of_bias = slopes(p, refs, state, b * p.heads + h, i, j, True, turned)
        refs.sums[...] += of_bias

    @pl.when(last)
    def _() -> None:
        sums = refs.sums[...]
        refs.d_bias[...] = sums if p.bias == "full" else jnp.sum(sums, axis=0, keepdims=True)
