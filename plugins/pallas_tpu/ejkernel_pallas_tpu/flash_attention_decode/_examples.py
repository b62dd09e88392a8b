"""Decoding with a cache, for estimates of time and memory: caches that are full, partly full, or rings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Example

VMEM, ESTIMATE = frozenset({"vmem"}), frozenset({"estimate"})
BF16 = "bfloat16"


def examples() -> Iterator[Example]:
    """Times for two caches of the same size, filled and not; memory for other heads, dtypes and arguments."""
    for queries in (1, 4, 16):
        yield _decode(ESTIMATE | VMEM if queries == 16 else ESTIMATE, 8, queries, 8192)
        yield _decode(ESTIMATE, 2, queries, 32768)
    yield _decode(ESTIMATE, 8, 1, 8192, filled=0.1)
    yield _decode(ESTIMATE, 8, 1, 8192, sliding_window=(1023, 0), causal=True)
    for heads, kv_heads, dim in ((32, 4, 256), (8, 1, 256), (16, 16, 64), (64, 64, 128), (9, 3, 128)):
        yield _decode(VMEM, 4, 4, 4096, heads, kv_heads, dim)
    yield _decode(VMEM, 4, 4, 4096, dtype="float32")
    yield _decode(VMEM, 4, 4, 4096, causal=True, logits_soft_cap=30.0, sinks=True)
    yield _decode(VMEM, 4, 4, 4096, causal=True, ring=True)
    yield _decode(VMEM, 4, 4, 4096, causal=True, ring=True, dtype="float32")


def _decode(
    uses: frozenset[str],
    batch: int,
    queries: int,
    slots: int,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    dtype: str = BF16,
    filled: float = 1.0,
    sinks: bool = False,
    ring: bool = False,
    **options: Any,
) -> Example:
    words = [f"{queries} queries", f"B{batch} S{slots} H{heads}/{kv_heads} D{dim} {dtype}", *options]
    words += [word for word, is_there in (("sinks", sinks), ("ring", ring)) if is_there]
    words += [] if filled == 1.0 else [f"filled to {filled:g}"]
    shapes: dict[str, tuple[int, ...]] = {"query": (batch, queries, heads, dim)}
    shapes |= dict.fromkeys(("key", "value"), (batch, slots, kv_heads, dim))
    shapes |= {"softmax_aux": (heads, 1)} if sinks else {}
    arguments = partial(_arguments, shapes, dtype, int(slots * filled), ring, options)
    return Example(", ".join(words), "flash_attention", arguments, dtype, (), checks=frozenset(), uses=uses)


def _arguments(
    shapes: dict[str, tuple[int, ...]], dtype: str, length: int, ring: bool, options: dict[str, Any], draw: int
) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(draw), len(shapes))
    arrays = {
        name: jax.random.normal(key, shape, jnp.float32).astype(dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    (batch, queries, *_), slots = shapes["query"], shapes["key"][1]
    lengths = jnp.full(batch, length, jnp.int32)
    if not ring:
        return {**arrays, "kv_lengths": lengths, **options}
    positions = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, slots))
    return {**arrays, "q_start": lengths - queries, "kv_positions": positions, **options}
