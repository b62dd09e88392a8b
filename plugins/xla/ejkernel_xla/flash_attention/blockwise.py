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
    """The output (batch, length, heads, value dim) and the lse (batch, heads, length)."""
    grid = tiling(arguments, q_block, kv_block)
    keys, values = grid.key_blocks(arguments["key"]), grid.key_blocks(arguments["value"])
    batch, kv_heads, groups = grid.shape
    dropout = arguments["dropout_prob"]
    start = _start(grid)

    def attend(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, query = block

        def tile(j: Any, state: State, is_masked: bool) -> State:
            row_max, row_sum, sums = state
            logits, _ = grid.logits(query, keys(j, is_masked), i, j, is_masked)
            # Weights are relative to the maximum so far. When a tile raises it, the earlier sums are corrected by
            # one factor, so that nothing overflows and nothing is computed twice.
            new_max = jnp.maximum(row_max, logits.max(-1, keepdims=True))
            correction = jnp.exp(row_max - new_max)
            weights = jnp.exp(logits - new_max)
            # The lse is that of all weights; dropout acts on the sum of values only.
            row_sum = row_sum * correction + weights.sum(-1, keepdims=True)
            if dropout:
                weights = jnp.where(grid.keep_mask(i, j), weights, 0)
            product = grid.weighted_sums("bhrk,bhkd->bhrd", weights, values(j, is_masked))
            return new_max, row_sum, sums * correction + product.reshape(sums.shape)

        row_max, row_sum, sums = grid.loop(i, tile, start)
        # A row that sees nothing has a sum of 0: its output is 0 and its lse -inf.
        out = sums * jnp.where(row_sum > 0, 1 / ((1 - dropout) * row_sum), 0)
        out = out.reshape(batch, kv_heads, groups * grid.q_block, out.shape[-1]).astype(arguments["value"].dtype)
        return out, row_max + jnp.log(row_sum)

    out, lse = lax.map(attend, (jnp.arange(grid.q_count, dtype=jnp.int32), grid.queries()))
    return grid.join_queries(out), grid.join_rows(lse)


def _start(grid: Tiling) -> State:
    # The maximum starts at the lowest finite number, which no finite logit is below, and not at -inf: in a row that has
    # no visible key yet, -inf - -inf would be NaN.
    batch, kv_heads, groups = grid.shape
    rows, width = (batch, kv_heads, groups, grid.q_block), grid.arguments["value"].shape[-1]
    row_max = jnp.full((*rows, 1), float(np.finfo(grid.dtype).min), grid.dtype)
    row_sum = jnp.zeros((*rows, 1), grid.dtype)
    if grid.arguments["softmax_aux"] is not None:
        # Sinks are logits without a value: they are in the sum before the first tile, and so exactly once.
        sinks = grid.arguments["softmax_aux"].astype(grid.dtype)
        sinks = sinks.reshape(1, kv_heads, groups, 1, sinks.shape[1])
        row_max = jnp.maximum(row_max, sinks.max(-1, keepdims=True, initial=-jnp.inf))
        row_sum = row_sum + jnp.exp(sinks - row_max).sum(-1, keepdims=True)
    return row_max, row_sum, jnp.zeros((*rows, width), grid.dtype)
