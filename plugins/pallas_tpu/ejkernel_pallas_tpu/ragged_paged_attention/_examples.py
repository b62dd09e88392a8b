"""Decoding and chunks of prompts, for estimates of time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp

from ejkernel_core import Example
from ejkernel_ops.ragged_paged_attention.examples import OP, large

VMEM, ESTIMATE = frozenset({"vmem"}), frozenset({"estimate"})
BF16 = "bfloat16"
#: (sequences, keys, queries) of those that are measured, and of others.
ESTIMATED = ((16, 4096, 1), (2, 2048, 512), (64, 8192, 1), (16, 4096, 4))


def examples() -> Iterator[Example]:
    """Times for decoding, several queries each and prompts; memory for other heads, dtypes, pages and arguments."""
    for sequences, keys, queries in ESTIMATED:
        name = f"{sequences} x {keys} keys, {queries} queries"
        yield _example(name, partial(large, sequences, keys, queries), ESTIMATE)
    yield _example("16 x 4096 keys, 1 query, pages of 16", partial(large, 16, 4096, 1, page_size=16), ESTIMATE)
    yield _example("16 x 4096 keys, 1 query, a window of 1024", partial(_windowed, 16, 4096, 1), ESTIMATE)
    yield _example("16 x 4096 keys, 1 query, fp8 pages", partial(_narrow, "float8_e4m3fn", 16, 4096, 1), ESTIMATE)
    for heads, kv_heads, dim in ((32, 4, 256), (8, 1, 256), (16, 16, 64), (64, 8, 128)):
        shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim}
        for queries in (1, 64):
            name = f"{heads} of {kv_heads} heads of {dim}, {queries} queries"
            yield _example(name, partial(large, 4, 1024, queries, **shape), VMEM)
    for dtype in ("int8", "float8_e4m3fn"):
        yield _example(f"{dtype} pages", partial(_narrow, dtype, 4, 1024, 16), VMEM)
    yield _example("all arguments", partial(_full, 4, 1024, 16), VMEM)
    yield _example("a pair", partial(_pair, 8, 64, BF16), VMEM)
    yield _example("a pair of one head", partial(_pair, 1, 16, BF16), VMEM)
    yield _example("a pair of one head, pages of 1024", partial(_pair, 1, 1024, BF16), VMEM)
    yield _example("a pair in float32", partial(_pair, 8, 16, "float32"), VMEM)
    for page_size in (1, 3, 24, 256, 1024):
        yield _example(f"pages of {page_size}", partial(large, 4, 1024, 4, page_size=page_size), VMEM)


def _example(name: str, draw: Any, uses: frozenset[str]) -> Example:
    return Example(name, OP, draw, BF16, checks=frozenset(), uses=uses)


def _windowed(*sizes: int) -> dict[str, Any]:
    return large(*sizes) | {"sliding_window": (1023, 0)}


def _narrow(dtype: str, *sizes: int) -> dict[str, Any]:
    call = large(*sizes)
    scale = jnp.full(8, 0.1, jnp.float32)
    return call | {"kv_pages": call["kv_pages"].astype(dtype), "k_scale": scale, "v_scale": scale}


def _full(*sizes: int) -> dict[str, Any]:
    """A window, a cap, sinks, and the pages of one of several layers."""
    options = {"sliding_window": (500, 0), "logits_soft_cap": 30.0, "return_lse": True}
    return large(*sizes) | options | {"softmax_aux": jnp.zeros(32, jnp.bfloat16), "first_page": jnp.int32(0)}


def _pair(kv_heads: int, page_size: int, dtype: str, draw: int) -> dict[str, Any]:
    """Keys and values apart, with values of another width."""
    call = large(4, 1024, 4, draw, heads=4 * kv_heads, kv_heads=kv_heads, page_size=page_size)
    pages = call.pop("kv_pages").astype(dtype)
    query = call["query"].astype(dtype)
    return call | {"query": query, "key_pages": pages[:, :, ::2], "value_pages": pages[:, :, 1::2, :64]}
