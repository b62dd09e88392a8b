"""The arrays of a call as the kernels take them: heads before tokens, tokens in whole blocks, one row for what is one
number a token; and for each its block of the tile that is worked on.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_pallas_tpu.flash_attention._problem import LANES, LEAST, LOG2E, Arguments, Problem, plane_dtype
from ejkernel_pallas_tpu.flash_attention._sight import intervals
from ejkernel_pallas_tpu.launch._launch import Operand, Output


def by_queries(x: jax.Array, p: Problem) -> Operand:
    """(batch, length, heads, dim) of queries."""
    x = filled(jnp.swapaxes(x, 1, 2), 2, p.q_count * p.q_block)
    return Operand(x, (None, None, p.q_block, x.shape[3]), lambda b, h, i, j: (b, h, i, 0))


def by_keys(x: jax.Array, p: Problem) -> Operand:
    """(batch, length, heads, dim) of keys: all the query heads of a group find theirs."""
    x = filled(jnp.swapaxes(x, 1, 2), 2, p.k_count * p.k_block)
    group = p.group
    return Operand(x, (None, None, p.k_block, x.shape[3]), lambda b, h, i, j: (b, h // group, j, 0))


def output_by_queries(p: Problem, dim: int) -> Output:
    """(batch, heads, length, dim), a block of queries at a time."""
    return Output(
        (p.batch, p.heads, p.q_count * p.q_block, dim),
        jnp.dtype(p.dtype),
        (None, None, p.q_block, dim),
        lambda b, h, i, j: (b, h, i, 0),
    )


def statistics(x: jax.Array, p: Problem, fill: float) -> Operand:
    """(batch, heads, length): one number for each query of each head."""
    x = filled(x[:, :, None].astype(jnp.float32), 3, p.q_count * p.q_block, fill)
    return Operand(x, (None, None, 1, p.q_block), lambda b, h, i, j: (b, h, 0, i))


def plane(x: jax.Array, p: Problem, kind: str, dtype: Any) -> Operand:
    """A bias or mask with four axes, each 1 or whole."""
    batched, headed = x.shape[0] > 1, x.shape[1] > 1
    x = x.astype(dtype)
    if kind == "queries":
        x = filled(jnp.swapaxes(x, 2, 3), 3, p.q_count * p.q_block)
        return Operand(x, (None, None, 1, p.q_block), lambda b, h, i, j: (b * batched, h * headed, 0, i))
    if x.shape[3] == 1:
        x = jnp.broadcast_to(x, (*x.shape[:3], p.k_length))
    x = filled(x, 3, p.k_count * p.k_block)
    if kind == "keys":
        return Operand(x, (None, None, 1, p.k_block), lambda b, h, i, j: (b * batched, h * headed, 0, j))
    x = filled(x, 2, p.q_count * p.q_block)
    return Operand(x, (None, None, p.q_block, p.k_block), lambda b, h, i, j: (b * batched, h * headed, i, j))


def tokens_of_queries(x: jax.Array, p: Problem) -> Operand:
    """(rows, length) of integers, one a query; one row serves every batch."""
    batched = x.shape[0] > 1
    x = filled(x[:, None], 2, p.q_count * p.q_block)
    return Operand(x, (None, 1, p.q_block), lambda b, h, i, j: (b * batched, 0, i))


def tokens_of_keys(x: jax.Array, p: Problem) -> Operand:
    batched = x.shape[0] > 1
    x = filled(x[:, None], 2, p.k_count * p.k_block)
    return Operand(x, (None, 1, p.k_block), lambda b, h, i, j: (b * batched, 0, j))


def sinks(x: jax.Array) -> Operand:
    """(heads, n) logits: the greatest of each head in units of log2, and under it what they all weigh beside it. They
    are two numbers, because far from 0 their sum would be the first of them; the same in every lane.
    """
    x = _within_reach(x.astype(jnp.float32))
    greatest = jnp.maximum(x.max(1, keepdims=True, initial=-jnp.inf), LEAST)
    two = jnp.concatenate([greatest * LOG2E, jnp.exp(x - greatest).sum(1, keepdims=True)], axis=1)
    lanes = jnp.broadcast_to(two[:, :, None], (x.shape[0], 2, LANES))
    return Operand(lanes, (None, 2, LANES), lambda b, h, i, j: (h, 0, 0))


def operands(a: Arguments, p: Problem) -> dict[str, Operand]:
    """What every pass reads, by name: what a call does not have is not there."""
    made = {
        "query": by_queries(a["query"], p),
        "key": by_keys(a["key"], p),
        "value": by_keys(a["value"], p),
    }
    if p.packed:
        start, end = intervals(a, p)
        made |= {"start": tokens_of_queries(start[None], p), "end": tokens_of_queries(end[None], p)}
    if p.segments:
        made["q_ids"] = tokens_of_queries(a["q_segment_ids"], p)
        made["k_ids"] = tokens_of_keys(a["kv_segment_ids"], p)
    if p.bias:
        made["bias"] = plane(_within_reach(a["bias"]), p, p.bias, plane_dtype(a["bias"].dtype))
    if p.mask:
        made["mask"] = plane(a["attention_mask"], p, p.mask, jnp.int8 if p.mask == "full" else jnp.int32)
    return made


def _within_reach(logits: jax.Array) -> jax.Array:
    if jnp.finfo(logits.dtype).min > LEAST:
        return logits
    return jnp.where(logits == -jnp.inf, logits, jnp.maximum(logits, LEAST))


def seed(a: Arguments) -> jax.Array:
    """The seed of the dropout as 32 bits; any number will do where there is none."""
    given = jnp.uint32(0) if a["dropout_seed"] is None else a["dropout_seed"]
    return jax.lax.bitcast_convert_type(given, jnp.int32).reshape(1)


def filled(x: jax.Array, axis: int, length: int, fill: float = 0) -> jax.Array:
    """An axis filled up at its end."""
    missing = length - x.shape[axis]
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if other == axis else 0) for other in range(x.ndim)], constant_values=fill)
