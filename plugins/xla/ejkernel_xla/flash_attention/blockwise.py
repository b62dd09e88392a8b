"""Flash attention forward, block by block, in plain JAX: the online softmax, with memory linear in the length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel_xla.flash_attention.tiling import Tiling, tiling

State = tuple[jax.Array, jax.Array, jax.Array]


def forward(arguments: Mapping[str, Any], q_block: int, kv_block: int) -> tuple[jax.Array, jax.Array]:
    """The output (batch, length, heads, value dim) and the log-sum-exp (batch, heads, length)."""
    grid = tiling(arguments, q_block, kv_block)
    keys, values = grid.cut_keys(arguments["key"]), grid.cut_keys(arguments["value"])
    batch, kv_heads, groups = grid.shape
    dropout = arguments["dropout_prob"]
    start = _start(grid)

    def attend(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, query = block

        def tile(j: Any, state: State, masked: bool) -> State:
            top, total, sums = state
            logits, _ = grid.logits(query, keys[j], i, j, masked)
            # Weights are relative to the greatest logit so far. When a tile raises it, what was summed before
            # shrinks by the same factor, so nothing ever overflows and nothing is computed twice.
            new_top = jnp.maximum(top, logits.max(-1, keepdims=True))
            shrink = jnp.exp(top - new_top)
            weights = jnp.exp(logits - new_top)
            # The log-sum-exp is that of all weights; dropout then takes some from the sum of values only.
            total = total * shrink + weights.sum(-1, keepdims=True)
            if dropout:
                weights = jnp.where(grid.kept(i, j), weights, 0)
            gained = grid.inner("bhrk,bhkd->bhrd", weights, values[j])
            return new_top, total, sums * shrink + gained.reshape(sums.shape)

        top, total, sums = grid.sweep(i, tile, start)
        # A row that saw nothing has a total of 0: its output is 0 and its log-sum-exp -inf.
        out = sums * jnp.where(total > 0, 1 / ((1 - dropout) * total), 0)
        out = out.reshape(batch, kv_heads, groups * grid.q_block, out.shape[-1]).astype(arguments["value"].dtype)
        return out, top + jnp.log(total)

    out, lse = lax.map(attend, (jnp.arange(grid.q_count, dtype=jnp.int32), grid.queries()))
    return grid.join_queries(out), grid.join_rows(lse)


def _start(grid: Tiling) -> State:
    # The greatest logit starts at the lowest finite number, not at -inf: -inf - -inf would be NaN in a row that has
    # not seen anything yet, and no finite logit is below it.
    batch, kv_heads, groups = grid.shape
    rows, width = (batch, kv_heads, groups, grid.q_block), grid.arguments["value"].shape[-1]
    top = jnp.full((*rows, 1), float(np.finfo(grid.dtype).min), grid.dtype)
    total = jnp.zeros((*rows, 1), grid.dtype)
    if grid.arguments["softmax_aux"] is not None:
        # Sinks are logits without a value: they are in the sum before the first tile, and so exactly once.
        sinks = grid.arguments["softmax_aux"].astype(grid.dtype)
        sinks = sinks.reshape(1, kv_heads, groups, 1, sinks.shape[1])
        top = jnp.maximum(top, sinks.max(-1, keepdims=True, initial=-jnp.inf))
        total = total + jnp.exp(sinks - top).sum(-1, keepdims=True)
    return top, total, jnp.zeros((*rows, width), grid.dtype)
