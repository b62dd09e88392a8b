"""The backward passes, from the lse of the forward. Each computes the weights of its tiles again.

One keeps a block of queries and sums over keys. The other keeps a block of keys and sums over the queries that see it,
of all the heads that share it, so that it finishes the gradients of keys and values itself.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_ops.flash_attention.statistics import BackwardRows
from ejkernel_pallas_tpu.flash_attention._operands import by_queries, operands, output_by_queries, statistics
from ejkernel_pallas_tpu.flash_attention._problem import Arguments, Problem
from ejkernel_pallas_tpu.flash_attention._scalars import read_entry
from ejkernel_pallas_tpu.flash_attention._steps import FIRST, LAST, Steps, inner_block, is_set, outer_block, run_step
from ejkernel_pallas_tpu.flash_attention._tile import logit_gradients, without_unfilled
from ejkernel_pallas_tpu.launch import Launch, Operand, Output, Scratch, grid_indices
from ejkernel_pallas_tpu.online_softmax.products import matmul


def all_operands(a: Arguments, p: Problem, rows: BackwardRows) -> dict[str, Operand]:
    """What the forward reads, the cotangent of its output, and the statistics of rows."""
    return {
        **operands(a, p),
        "d_out": by_queries(rows.d_out, p),
        # Queries that are padding have no weights.
        "lse": statistics(rows.lse, p, jnp.inf),
        "delta": statistics(rows.delta, p, 0.0),
    }


# -- queries -------------------------------------------------------------------------------------------------------


def query_pass(a: Arguments, p: Problem, rows: BackwardRows, steps: Steps) -> Launch:
    """The launch that computes the gradient of queries."""

    def tile_map(b: Any, h: Any, t: Any, table: Any, numbers: Any) -> tuple[Any, Any, Any, Any]:
        word = steps.word(table, b, t)
        return b, h, outer_block(word), inner_block(word)

    return Launch(
        name="flash_attention_bwd_queries",
        kernel=lambda table, numbers, refs: _sum_over_keys(p, steps, table, numbers, refs),
        grid=(p.batch, p.heads, steps.count),
        semantics=("parallel", "parallel", "arbitrary"),
        tile_map=tile_map,
        operands=all_operands(a, p, rows),
        outputs={"d_query": output_by_queries(p, p.dim)},
        scratch={"sums": Scratch((p.q_block, p.dim))},
    )


def _sum_over_keys(p: Problem, steps: Steps, table: Any, numbers: Any, refs: Any) -> None:
    b, h, step = grid_indices(3)
    word, entry = steps.word(table, b, step), read_entry(p, numbers, b)
    i = outer_block(word)

    @pl.when(is_set(word, FIRST))
    def _() -> None:
        refs.sums[...] = jnp.zeros((p.q_block, p.dim), jnp.float32)

    def tile(j: Any, is_masked: bool) -> None:
        head = b * p.heads + h
        _, d_products, _ = logit_gradients(p, refs, entry, head, i, j, is_masked, is_transposed=False)
        refs.sums[...] += matmul(d_products, without_unfilled(refs.key[...], p, refs, entry, j, is_masked))

    run_step(steps, word, tile)

    @pl.when(is_set(word, LAST))
    def _() -> None:
        refs.d_query[...] = (refs.sums[...] * p.scale).astype(refs.d_query.dtype)


# -- keys and values -----------------------------------------------------------------------------------------------


def key_pass(a: Arguments, p: Problem, rows: BackwardRows, steps: Steps) -> Launch:
    """The launch that computes the gradients of keys and values."""
    group = p.group

    def tile_map(b: Any, h: Any, t: Any, g: Any, table: Any, numbers: Any) -> tuple[Any, Any, Any, Any]:
        word = steps.word(table, b, t)
        return b, h * group + g, inner_block(word), outer_block(word)

    def output(dim: int) -> Output:
        return Output(
            (p.batch, p.kv_heads, p.k_count * p.k_block, dim),
            jnp.dtype(p.dtype),
            (None, None, p.k_block, dim),
            lambda b, h, i, j: (b, h // group, j, 0),
        )

    return Launch(
        name="flash_attention_bwd_keys",
        kernel=lambda table, numbers, refs: _sum_over_queries(p, steps, table, numbers, refs),
        grid=(p.batch, p.kv_heads, steps.count, group),
        semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        tile_map=tile_map,
        operands=all_operands(a, p, rows),
        outputs={"d_key": output(p.dim), "d_value": output(p.v_dim)},
        scratch={"k_sums": Scratch((p.k_block, p.dim)), "v_sums": Scratch((p.k_block, p.v_dim))},
    )


def _sum_over_queries(p: Problem, steps: Steps, table: Any, numbers: Any, refs: Any) -> None:
    b, kv_head, step, member = grid_indices(4)
    word, entry = steps.word(table, b, step), read_entry(p, numbers, b)
    j = outer_block(word)
    head = b * p.heads + kv_head * p.group + member

    @pl.when(jnp.logical_and(member == 0, is_set(word, FIRST)))
    def _() -> None:
        refs.k_sums[...] = jnp.zeros((p.k_block, p.dim), jnp.float32)
        refs.v_sums[...] = jnp.zeros((p.k_block, p.v_dim), jnp.float32)

    def tile(i: Any, is_masked: bool) -> None:
        weights, d_products, _ = logit_gradients(p, refs, entry, head, i, j, is_masked, is_transposed=True)
        refs.v_sums[...] += matmul(weights, refs.d_out[...])
        refs.k_sums[...] += matmul(d_products, refs.query[...])

    run_step(steps, word, tile)

    @pl.when(jnp.logical_and(member == p.group - 1, is_set(word, LAST)))
    def _() -> None:
        refs.d_key[...] = (refs.k_sums[...] * p.scale).astype(refs.d_key.dtype)
        refs.d_value[...] = refs.v_sums[...].astype(refs.d_value.dtype)
