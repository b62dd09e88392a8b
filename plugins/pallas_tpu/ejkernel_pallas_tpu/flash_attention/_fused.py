"""The backward passes in one, where vector memory holds the sums for all keys of a head.

The two passes compute each tile's weights twice, seven products in all; this one five. A block of queries stays, as in
the pass for queries, and what each tile gives its keys and values is added up in vector memory until the last head that
shares them is through.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas_tpu.flash_attention._backward import all_operands
from ejkernel_pallas_tpu.flash_attention._operands import output_by_queries
from ejkernel_pallas_tpu.flash_attention._problem import Arguments, Problem
from ejkernel_pallas_tpu.flash_attention._rows import Rows
from ejkernel_pallas_tpu.flash_attention._sight import FIRST, LAST, Sight, is_set, passing, staying
from ejkernel_pallas_tpu.flash_attention._tile import inner, slopes
from ejkernel_pallas_tpu.flash_attention._walk import visit
from ejkernel_pallas_tpu.launch._launch import Launch, Output, ids


def fused(a: Arguments, p: Problem, rows: Rows, sight: Sight) -> Launch:
    """The launch that makes the gradients of queries, keys and values."""
    group, length = p.group, p.k_count * p.k_block

    def at(b: Any, h: Any, g: Any, t: Any, table: Any, seed: Any) -> tuple[Any, Any, Any, Any]:
        word = sight.word(table, b, t)
        return b, h * group + g, staying(word), passing(word)

    def of_all_keys(dim: int) -> Output:
        return Output(
            (p.batch, p.kv_heads, length, dim),
            jnp.dtype(p.dtype),
            (None, None, length, dim),
            lambda b, h, i, j: (b, h // group, 0, 0),
        )

    return Launch(
        name="flash_attention_bwd_fused",
        kernel=lambda table, seed, refs: _sum_both_ways(p, sight, table, seed, refs),
        grid=(p.batch, p.kv_heads, group, sight.steps),
        semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        at=at,
        operands=all_operands(a, p, rows),
        outputs={
            "d_query": output_by_queries(p, p.dim),
            "d_key": of_all_keys(p.dim),
            "d_value": of_all_keys(p.v_dim),
        },
        scratch={"q_sums": (p.q_block, p.dim), "k_sums": (length, p.dim), "v_sums": (length, p.v_dim)},
    )


def _sum_both_ways(p: Problem, sight: Sight, table: Any, seed: Any, refs: Any) -> None:
    b, kv_head, member, step = ids(4)
    word, state = sight.word(table, b, step), seed[0]
    i = staying(word)
    head = b * p.heads + kv_head * p.group + member

    def of(j: Any) -> Any:
        return pl.ds(pl.multiple_of(j * p.k_block, p.k_block), p.k_block)

    @pl.when(jnp.logical_and(member == 0, step == 0))
    def _() -> None:
        def clear(j: Any, _: Any) -> None:
            refs.k_sums[of(j)] = jnp.zeros((p.k_block, p.dim), jnp.float32)
            refs.v_sums[of(j)] = jnp.zeros((p.k_block, p.v_dim), jnp.float32)

        jax.lax.fori_loop(0, p.k_count, clear, None)

    @pl.when(is_set(word, FIRST))
    def _() -> None:
        refs.q_sums[...] = jnp.zeros((p.q_block, p.dim), jnp.float32)

    def meet(j: Any, masked: bool) -> None:
        weights, of_product, _ = slopes(p, refs, state, head, i, j, masked, turned=True)
        refs.v_sums[of(j)] += inner(weights, refs.d_out[...])
        refs.k_sums[of(j)] += inner(of_product, refs.query[...])
        refs.q_sums[...] += inner(of_product.T, refs.key[...])

    visit(sight, word, meet)

    @pl.when(is_set(word, LAST))
    def _() -> None:
        refs.d_query[...] = (refs.q_sums[...] * p.scale).astype(refs.d_query.dtype)

    @pl.when(jnp.logical_and(member == p.group - 1, step == sight.steps - 1))
    def _() -> None:
        def write(j: Any, _: Any) -> None:
            refs.d_key[of(j)] = (refs.k_sums[of(j)] * p.scale).astype(refs.d_key.dtype)
            refs.d_value[of(j)] = refs.v_sums[of(j)].astype(refs.d_value.dtype)

        jax.lax.fori_loop(0, p.k_count, write, None)
