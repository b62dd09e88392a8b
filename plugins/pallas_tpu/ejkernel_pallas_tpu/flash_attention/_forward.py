"""The forward pass: a block of queries of one head stays, and the keys that it can see go by."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas_tpu.flash_attention._operands import operands, output_by_queries, sinks
from ejkernel_pallas_tpu.flash_attention._problem import LANES, LEAST, LOG2E, LOWEST, Arguments, Problem
from ejkernel_pallas_tpu.flash_attention._sight import FIRST, LAST, Sight, is_set, passing, staying
from ejkernel_pallas_tpu.flash_attention._tile import inner, kept, logits, row, wide
from ejkernel_pallas_tpu.flash_attention._walk import visit
from ejkernel_pallas_tpu.launch._launch import Launch, Output, ids


def forward(a: Arguments, p: Problem, sight: Sight) -> Launch:
    """The launch that makes the output and the log-sum-exps."""

    def at(b: Any, h: Any, t: Any, table: Any, seed: Any) -> tuple[Any, Any, Any, Any]:
        word = sight.word(table, b, t)
        return b, h, staying(word), passing(word)

    made = operands(a, p)
    if p.sinks:
        made["sinks"] = sinks(a["softmax_aux"])
    return Launch(
        name="flash_attention",
        kernel=lambda table, seed, refs: _attend(p, sight, table, seed, refs),
        grid=(p.batch, p.heads, sight.steps),
        semantics=("parallel", "parallel", "arbitrary"),
        at=at,
        operands=made,
        outputs={
            "out": output_by_queries(p, p.v_dim),
            "lse": Output(
                (p.batch, p.heads, 1, p.q_count * p.q_block),
                jnp.dtype(jnp.float32),
                (None, None, 1, p.q_block),
                lambda b, h, i, j: (b, h, 0, i),
            ),
        },
        scratch={"top": (p.q_block, LANES), "total": (p.q_block, LANES), "sums": (p.q_block, p.v_dim)},
    )


def _attend(p: Problem, sight: Sight, table: Any, seed: Any, refs: Any) -> None:
    b, h, step = ids(3)
    word, state = sight.word(table, b, step), seed[0]
    i = staying(word)

    @pl.when(is_set(word, FIRST))
    def _() -> None:
        # Sinks are logits without a value: in the sum before the first block, so once.
        if p.sinks:
            refs.top[...] = jnp.broadcast_to(refs.sinks[:1], (p.q_block, LANES))
            refs.total[...] = jnp.broadcast_to(refs.sinks[1:], (p.q_block, LANES))
        else:
            refs.top[...] = jnp.full((p.q_block, LANES), LOWEST, jnp.float32)
            refs.total[...] = jnp.zeros((p.q_block, LANES), jnp.float32)
        refs.sums[...] = jnp.zeros((p.q_block, p.v_dim), jnp.float32)

    def meet(j: Any, masked: bool) -> None:
        x, _ = logits(p, refs, i, j, masked)
        before = refs.top[...]
        top = jnp.maximum(before, jnp.max(x, axis=1, keepdims=True))
        shrink = jnp.exp2(before - top)
        weights = jnp.exp2(x - wide(top, p.k_block))
        refs.total[...] = refs.total[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        refs.top[...] = top
        if p.drop:
            weights = jnp.where(kept(p, state, b * p.heads + h, i, j), weights, 0.0)
        refs.sums[...] = refs.sums[...] * wide(shrink, p.v_dim) + inner(weights, refs.value[...])

    visit(sight, word, meet)

    @pl.when(is_set(word, LAST))
    def _() -> None:
        # A row that saw nothing has a total of 0: its output is 0, and its log-sum-exp -inf.
        total = refs.total[...]
        some = total > 0.0
        real = jnp.where(some, total, 1.0)
        factor = jnp.where(some, 1.0 / ((1.0 - p.drop) * real), 0.0)
        refs.out[...] = (refs.sums[...] * wide(factor, p.v_dim)).astype(refs.out.dtype)
        lse = (refs.top[...] + jnp.log2(real)) * (1.0 / LOG2E)
        if p.bias:  # as low as a bias is taken: the lowest number that was given
            lse = jnp.where(refs.top[...] <= LEAST * LOG2E, LOWEST, lse)
        refs.lse[...] = row(jnp.where(some, lse, -jnp.inf))


def attend(
    a: Arguments, p: Problem, sight: Sight, seed: jax.Array, interpret: Any, vmem: int | None
) -> tuple[jax.Array, jax.Array]:
    """(batch, length, heads, dim), and (batch, heads, length)."""
    out, lse = forward(a, p, sight)((sight.table, seed), interpret, vmem)
    return jnp.swapaxes(out, 1, 2)[:, : p.q_length], lse[:, :, 0, : p.q_length]
