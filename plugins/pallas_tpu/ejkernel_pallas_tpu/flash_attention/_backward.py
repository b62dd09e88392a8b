"""The backward passes, from the forward's log-sum-exps. Each computes the weights of its tiles anew.

One keeps a block of queries and adds up over keys. One keeps a block of keys and adds up over the queries that see it,
of all the heads that share it: so the gradients of keys and values are finished where they are made.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas_tpu.flash_attention._operands import Operand, by_queries, operands, output_by_queries, statistics
from ejkernel_pallas_tpu.flash_attention._problem import Arguments, Problem
from ejkernel_pallas_tpu.flash_attention._rows import Rows
from ejkernel_pallas_tpu.flash_attention._sight import FIRST, LAST, Sight, is_set, passing, staying
from ejkernel_pallas_tpu.flash_attention._tile import inner, slopes
from ejkernel_pallas_tpu.flash_attention._walk import visit
from ejkernel_pallas_tpu.launch._launch import Launch, Output, ids


def all_operands(a: Arguments, p: Problem, rows: Rows) -> dict[str, Operand]:
    """What the forward reads, and what comes back from behind it."""
    return {
        **operands(a, p),
        "d_out": by_queries(rows.d_out, p),
        # What is no query has no weight.
        "top": statistics(rows.top, p, jnp.inf),
        "shift": statistics(rows.shift, p, 0.0),
    }


# -- for queries ---------------------------------------------------------------------------------------------------


def over_keys(a: Arguments, p: Problem, rows: Rows, sight: Sight) -> Launch:
    """The launch that makes the gradient of queries."""

    def at(b: Any, h: Any, t: Any, table: Any, seed: Any) -> tuple[Any, Any, Any, Any]:
        word = sight.word(table, b, t)
        return b, h, staying(word), passing(word)

    return Launch(
        name="flash_attention_bwd_queries",
        kernel=lambda table, seed, refs: _sum_over_keys(p, sight, table, seed, refs),
        grid=(p.batch, p.heads, sight.steps),
        semantics=("parallel", "parallel", "arbitrary"),
        at=at,
        operands=all_operands(a, p, rows),
        outputs={"d_query": output_by_queries(p, p.dim)},
        scratch={"sums": (p.q_block, p.dim)},
    )


def _sum_over_keys(p: Problem, sight: Sight, table: Any, seed: Any, refs: Any) -> None:
    b, h, step = ids(3)
    word, state = sight.word(table, b, step), seed[0]
    i = staying(word)

    @pl.when(is_set(word, FIRST))
    def _() -> None:
        refs.sums[...] = jnp.zeros((p.q_block, p.dim), jnp.float32)

    def meet(j: Any, masked: bool) -> None:
        _, of_product, _ = slopes(p, refs, state, b * p.heads + h, i, j, masked, turned=False)
        refs.sums[...] += inner(of_product, refs.key[...])

    visit(sight, word, meet)

    @pl.when(is_set(word, LAST))
    def _() -> None:
        refs.d_query[...] = (refs.sums[...] * p.scale).astype(refs.d_query.dtype)


# -- for keys and values -------------------------------------------------------------------------------------------


def over_queries(a: Arguments, p: Problem, rows: Rows, sight: Sight) -> Launch:
    """The launch that makes the gradients of keys and values."""
    group = p.group

    def at(b: Any, h: Any, t: Any, g: Any, table: Any, seed: Any) -> tuple[Any, Any, Any, Any]:
        word = sight.word(table, b, t)
        return b, h * group + g, passing(word), staying(word)

    def output(dim: int) -> Output:
        return Output(
            (p.batch, p.kv_heads, p.k_count * p.k_block, dim),
            jnp.dtype(p.dtype),
            (None, None, p.k_block, dim),
            lambda b, h, i, j: (b, h // group, j, 0),
        )

    return Launch(
        name="flash_attention_bwd_keys",
        kernel=lambda table, seed, refs: _sum_over_queries(p, sight, table, seed, refs),
        grid=(p.batch, p.kv_heads, sight.steps, group),
        semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        at=at,
        operands=all_operands(a, p, rows),
        outputs={"d_key": output(p.dim), "d_value": output(p.v_dim)},
        scratch={"k_sums": (p.k_block, p.dim), "v_sums": (p.k_block, p.v_dim)},
    )


def _sum_over_queries(p: Problem, sight: Sight, table: Any, seed: Any, refs: Any) -> None:
    b, kv_head, step, member = ids(4)
    word, state = sight.word(table, b, step), seed[0]
    j = staying(word)
    head = b * p.heads + kv_head * p.group + member

    @pl.when(jnp.logical_and(member == 0, is_set(word, FIRST)))
    def _() -> None:
        refs.k_sums[...] = jnp.zeros((p.k_block, p.dim), jnp.float32)
        refs.v_sums[...] = jnp.zeros((p.k_block, p.v_dim), jnp.float32)

    def meet(i: Any, masked: bool) -> None:
        weights, of_product, _ = slopes(p, refs, state, head, i, j, masked, turned=True)
        refs.v_sums[...] += inner(weights, refs.d_out[...])
        refs.k_sums[...] += inner(of_product, refs.query[...])

    visit(sight, word, meet)

    @pl.when(jnp.logical_and(member == p.group - 1, is_set(word, LAST)))
    def _() -> None:
        refs.d_key[...] = (refs.k_sums[...] * p.scale).astype(refs.d_key.dtype)
        refs.d_value[...] = refs.v_sums[...].astype(refs.d_value.dtype)
