"""The backward passes in one, where vector memory holds the sums for all keys of a head.

Two passes compute the weights of each tile twice, with seven products; this one takes five. A block of queries stays,
as in the pass for queries, and the gradients of keys and values are summed in vector memory until the last head that
shares them is done.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_ops.flash_attention.statistics import BackwardRows
from ejkernel_pallas_tpu.flash_attention._backward import all_operands
from ejkernel_pallas_tpu.flash_attention._operands import output_by_queries
from ejkernel_pallas_tpu.flash_attention._problem import Arguments, Problem
from ejkernel_pallas_tpu.flash_attention._scalars import read_entry
from ejkernel_pallas_tpu.flash_attention._steps import FIRST, LAST, Steps, inner_block, is_set, outer_block, run_step
from ejkernel_pallas_tpu.flash_attention._tile import logit_gradients, without_unfilled
from ejkernel_pallas_tpu.launch import Launch, Output, Scratch, grid_indices
from ejkernel_pallas_tpu.online_softmax.products import matmul


def fused_pass(a: Arguments, p: Problem, rows: BackwardRows, steps: Steps) -> Launch:
    """The launch that computes the gradients of queries, keys and values."""
    group, length = p.group, p.k_count * p.k_block

    def tile_map(b: Any, h: Any, g: Any, t: Any, table: Any, numbers: Any) -> tuple[Any, Any, Any, Any]:
        word = steps.word(table, b, t)
        return b, h * group + g, outer_block(word), inner_block(word)

    def output_by_keys(dim: int) -> Output:
        return Output(
            (p.batch, p.kv_heads, length, dim),
            jnp.dtype(p.dtype),
            (None, None, length, dim),
            lambda b, h, i, j: (b, h // group, 0, 0),
        )

    return Launch(
        name="flash_attention_bwd_fused",
        kernel=lambda table, numbers, refs: _sum_both_ways(p, steps, table, numbers, refs),
        grid=(p.batch, p.kv_heads, group, steps.count),
        semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        tile_map=tile_map,
        operands=all_operands(a, p, rows),
        outputs={
            "d_query": output_by_queries(p, p.dim),
            "d_key": output_by_keys(p.dim),
            "d_value": output_by_keys(p.v_dim),
        },
        scratch={
            "q_sums": Scratch((p.q_block, p.dim)),
            "k_sums": Scratch((length, p.dim)),
            "v_sums": Scratch((length, p.v_dim)),
        },
    )


def _sum_both_ways(p: Problem, steps: Steps, table: Any, numbers: Any, refs: Any) -> None:
    b, kv_head, member, step = grid_indices(4)
    word, entry = steps.word(table, b, step), read_entry(p, numbers, b)
    i = outer_block(word)
    head = b * p.heads + kv_head * p.group + member

    def keys_of(j: Any) -> Any:
        return pl.ds(pl.multiple_of(j * p.k_block, p.k_block), p.k_block)

    @pl.when(jnp.logical_and(member == 0, step == 0))
    def _() -> None:
        def clear(j: Any, _: Any) -> None:
            refs.k_sums[keys_of(j)] = jnp.zeros((p.k_block, p.dim), jnp.float32)
            refs.v_sums[keys_of(j)] = jnp.zeros((p.k_block, p.v_dim), jnp.float32)

        jax.lax.fori_loop(0, p.k_count, clear, None)

    @pl.when(is_set(word, FIRST))
    def _() -> None:
        refs.q_sums[...] = jnp.zeros((p.q_block, p.dim), jnp.float32)

    def tile(j: Any, is_masked: bool) -> None:
        weights, d_products, _ = logit_gradients(p, refs, entry, head, i, j, is_masked, is_transposed=True)
        refs.v_sums[keys_of(j)] += matmul(weights, refs.d_out[...])
        refs.k_sums[keys_of(j)] += matmul(d_products, refs.query[...])
        refs.q_sums[...] += matmul(d_products.T, without_unfilled(refs.key[...], p, refs, entry, j, is_masked))

    run_step(steps, word, tile)

    @pl.when(is_set(word, LAST))
    def _() -> None:
        refs.d_query[...] = (refs.q_sums[...] * p.scale).astype(refs.d_query.dtype)

    @pl.when(jnp.logical_and(member == p.group - 1, step == steps.count - 1))
    def _() -> None:
        def write(j: Any, _: Any) -> None:
            refs.d_key[keys_of(j)] = (refs.k_sums[keys_of(j)] * p.scale).astype(refs.d_key.dtype)
            refs.d_value[keys_of(j)] = refs.v_sums[keys_of(j)].astype(refs.d_value.dtype)

        jax.lax.fori_loop(0, p.k_count, write, None)
