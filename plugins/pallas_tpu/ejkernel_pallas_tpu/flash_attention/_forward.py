"""The forward pass: a block of queries of one head stays, and the keys that it sees are fetched block by block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_core import Invocation
from ejkernel_ops.flash_attention.statistics import LOG2E
from ejkernel_pallas_tpu.flash_attention._operands import operands, output_by_queries, sinks
from ejkernel_pallas_tpu.flash_attention._problem import LANES, Problem
from ejkernel_pallas_tpu.flash_attention._scalars import read_entry
from ejkernel_pallas_tpu.flash_attention._steps import FIRST, LAST, Steps, inner_block, is_set, outer_block, run_step
from ejkernel_pallas_tpu.flash_attention._tile import keep_mask, logits, row, without_unfilled
from ejkernel_pallas_tpu.launch import Launch, Output, Scratch, grid_indices
from ejkernel_pallas_tpu.online_softmax.products import matmul, widen
from ejkernel_pallas_tpu.online_softmax.statistics import LEAST, LOWEST, divisors, natural_lse, weigh


def forward(inv: Invocation, p: Problem, steps: Steps) -> Launch:
    """The launch that computes the output and, if it is needed, the lse."""

    def tile_map(b: Any, h: Any, t: Any, table: Any, numbers: Any) -> tuple[Any, Any, Any, Any]:
        word = steps.word(table, b, t)
        return b, h, outer_block(word), inner_block(word)

    inputs = operands(inv, p)
    if p.sinks:
        inputs["sinks"] = sinks(inv["softmax_aux"])
    lse = Output(
        (p.batch, p.heads, 1, p.q_count * p.q_block),
        jnp.dtype(jnp.float32),
        (None, None, 1, p.q_block),
        lambda b, h, i, j: (b, h, 0, i),
    )
    return Launch(
        name="flash_attention",
        kernel=lambda table, numbers, refs: _attend(p, steps, table, numbers, refs, inv.needs("lse")),
        grid=(p.batch, p.heads, steps.count),
        semantics=("parallel", "parallel", "arbitrary"),
        tile_map=tile_map,
        operands=inputs,
        outputs={"out": output_by_queries(p, p.v_dim), **({"lse": lse} if inv.needs("lse") else {})},
        scratch={
            **dict.fromkeys(("row_max", "row_sum"), Scratch((p.q_block, LANES))),
            "sums": Scratch((p.q_block, p.v_dim)),
        },
    )


def _attend(p: Problem, steps: Steps, table: Any, numbers: Any, refs: Any, has_lse: bool) -> None:
    b, h, step = grid_indices(3)
    word, entry = steps.word(table, b, step), read_entry(p, numbers, b)
    i = outer_block(word)

    @pl.when(is_set(word, FIRST))
    def _() -> None:
        # Sinks are logits without a value: they are in the sum before the first block, and so exactly once.
        if p.sinks:
            refs.row_max[...] = jnp.broadcast_to(refs.sinks[:1], (p.q_block, LANES))
            refs.row_sum[...] = jnp.broadcast_to(refs.sinks[1:], (p.q_block, LANES))
        else:
            refs.row_max[...] = jnp.full((p.q_block, LANES), LOWEST, jnp.float32)
            refs.row_sum[...] = jnp.zeros((p.q_block, LANES), jnp.float32)
        refs.sums[...] = jnp.zeros((p.q_block, p.v_dim), jnp.float32)

    def tile(j: Any, is_masked: bool) -> None:
        x, _ = logits(p, refs, entry, i, j, is_masked)
        weights, correction = weigh(x, refs.row_max, refs.row_sum)
        if p.dropout:
            weights = jnp.where(keep_mask(p, entry.seed, b * p.heads + h, i, j), weights, 0.0)
        kept = refs.sums[...] * widen(correction, p.v_dim)
        refs.sums[...] = kept + matmul(weights, without_unfilled(refs.value[...], p, refs, entry, j, is_masked))

    run_step(steps, word, tile)

    @pl.when(is_set(word, LAST))
    def _() -> None:
        # A row that sees nothing has a sum of 0: its output is 0, and its lse -inf.
        has_keys, divisor = divisors(refs.row_sum)
        factor = jnp.where(has_keys, 1.0 / ((1.0 - p.dropout) * divisor), 0.0)
        refs.out[...] = (refs.sums[...] * widen(factor, p.v_dim)).astype(refs.out.dtype)
        if not has_lse:
            return
        lse = natural_lse(refs.row_max, divisor)
        if p.bias:  # a bias below LEAST was read as LEAST: it was the lowest number
            lse = jnp.where(refs.row_max[...] <= LEAST * LOG2E, LOWEST, lse)
        refs.lse[...] = row(jnp.where(has_keys, lse, -jnp.inf))


def attend(
    inv: Invocation, p: Problem, steps: Steps, numbers: jax.Array, interpret: Any, vmem: int | None
) -> tuple[jax.Array, jax.Array | None]:
    """(batch, length, heads, dim), and (batch, heads, length) if it is needed."""
    out, *lse = forward(inv, p, steps)((steps.table, numbers), interpret, vmem)
    return jnp.swapaxes(out, 1, 2)[:, : p.q_length], lse[0][:, :, 0, : p.q_length] if lse else None
