"""The arrays of a call as the kernels take them, and for each which of its blocks a tile reads.

Heads come before tokens, tokens are padded to whole blocks, and one number for each token is a row.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_ops.flash_attention.geometry import key_intervals, pad_to
from ejkernel_pallas_tpu.flash_attention._problem import LANES, Arguments, Problem, bias_dtype
from ejkernel_pallas_tpu.launch import Operand, Output
from ejkernel_pallas_tpu.online_softmax.statistics import at_least, sink_statistics


def by_queries(x: jax.Array, p: Problem) -> Operand:
    """(batch, length, heads, dim) of queries."""
    x = pad_to(jnp.swapaxes(x, 1, 2), 2, p.q_count * p.q_block)
    return Operand(x, (None, None, p.q_block, x.shape[3]), lambda b, h, i, j: (b, h, i, 0))


def by_keys(x: jax.Array, p: Problem) -> Operand:
    """(batch, length, heads, dim) of keys: each query head reads the head of its group."""
    x = pad_to(jnp.swapaxes(x, 1, 2), 2, p.k_count * p.k_block)
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
    x = pad_to(x[:, :, None].astype(jnp.float32), 3, p.q_count * p.q_block, fill)
    return Operand(x, (None, None, 1, p.q_block), lambda b, h, i, j: (b, h, 0, i))


def bias_or_mask(x: jax.Array, p: Problem, layout: str, dtype: Any) -> Operand:
    """A bias or mask with four axes, each of them 1 or of full length."""
    batched, headed = x.shape[0] > 1, x.shape[1] > 1
    x = x.astype(dtype)
    if layout == "queries":
        x = pad_to(jnp.swapaxes(x, 2, 3), 3, p.q_count * p.q_block)
        return Operand(x, (None, None, 1, p.q_block), lambda b, h, i, j: (b * batched, h * headed, 0, i))
    if x.shape[3] == 1:
        x = jnp.broadcast_to(x, (*x.shape[:3], p.k_length))
    x = pad_to(x, 3, p.k_count * p.k_block)
    if layout == "keys":
        return Operand(x, (None, None, 1, p.k_block), lambda b, h, i, j: (b * batched, h * headed, 0, j))
    x = pad_to(x, 2, p.q_count * p.q_block)
    return Operand(x, (None, None, p.q_block, p.k_block), lambda b, h, i, j: (b * batched, h * headed, i, j))


def query_numbers(x: jax.Array, p: Problem) -> Operand:
    """(rows, length): one integer for each query; a single row is for every batch entry."""
    batched = x.shape[0] > 1
    x = pad_to(x[:, None], 2, p.q_count * p.q_block)
    return Operand(x, (None, 1, p.q_block), lambda b, h, i, j: (b * batched, 0, i))


def key_numbers(x: jax.Array, p: Problem, fill: int = 0) -> Operand:
    batched = x.shape[0] > 1
    x = pad_to(x[:, None], 2, p.k_count * p.k_block, fill)
    return Operand(x, (None, 1, p.k_block), lambda b, h, i, j: (b * batched, 0, j))


def sinks(x: jax.Array) -> Operand:
    """Of the sinks, (heads, n), the statistics of each head, repeated in every lane."""
    lanes = jnp.broadcast_to(sink_statistics(x)[:, :, None], (x.shape[0], 2, LANES))
    return Operand(lanes, (None, 2, LANES), lambda b, h, i, j: (h, 0, 0))


def operands(a: Arguments, p: Problem) -> dict[str, Operand]:
    """What every pass reads, by name, without what the call does not have."""
    inputs = {
        "query": by_queries(a["query"], p),
        "key": by_keys(a["key"], p),
        "value": by_keys(a["value"], p),
    }
    if p.packed:
        start, end = key_intervals(a)
        inputs |= {"start": query_numbers(start[None], p), "end": query_numbers(end[None], p)}
    if p.segments:
        inputs["q_ids"] = query_numbers(a["q_segment_ids"], p)
        inputs["k_ids"] = key_numbers(a["kv_segment_ids"], p)
    if p.empty == "positions":
        inputs["k_positions"] = key_numbers(a["kv_positions"], p, fill=-1)
    if p.bias:
        inputs["bias"] = bias_or_mask(at_least(a["bias"]), p, p.bias, bias_dtype(a["bias"].dtype))
    if p.mask:
        inputs["mask"] = bias_or_mask(a["attention_mask"], p, p.mask, jnp.int8 if p.mask == "full" else jnp.int32)
    return inputs
