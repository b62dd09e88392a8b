"""A call in numbers that are known while it is traced: what decides which code there is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
import jax.numpy as jnp

from ejkernel_ops.flash_attention.dropout import threshold
from ejkernel_ops.flash_attention.tokens import band

Arguments = Mapping[str, Any]

#: How many numbers lie side by side in a TPU's vector register. Every block of tokens is a multiple of it.
LANES = 128
#: Logits are kept in units of log2, because the hardware's exponential is that of 2.
LOG2E = 1.4426950408889634
#: Where the greatest logit of a row starts: below every finite one, and not -inf, whose difference with itself is NaN.
LOWEST = -3.4028234663852886e38
#: A finite bias or sink is taken to be no less, so that it is finite in units of log2 too: the lowest numbers, which
#: many use for "hidden", hide nothing from a row that has nothing else. A power of two, which bfloat16 has.
LEAST = -(2.0**126)


@attrs.frozen
class Problem:
    """One call, cut into blocks of queries and of keys."""

    q_block: int
    k_block: int
    batch: int
    heads: int
    kv_heads: int
    q_length: int
    k_length: int
    dim: int
    v_dim: int
    dtype: str
    scale: float
    cap: float
    #: How many keys before its own place a query sees, and behind it; None where nothing limits it.
    before: int | None
    after: int | None
    packed: bool
    segments: bool
    sinks: bool
    #: How a bias and a mask lie: a plane "full" of (query, key) pairs, one row for all queries, of "keys", or one
    #: number for all keys, a row of "queries"; None where there is none.
    bias: str | None
    mask: str | None
    drop: float
    threshold: int

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.heads // self.kv_heads

    @property
    def q_count(self) -> int:
        return blocks(self.q_length, self.q_block)

    @property
    def k_count(self) -> int:
        return blocks(self.k_length, self.k_block)

    @property
    def shift(self) -> int:
        """What a query's index is behind its place among the keys: the last query stands at the last key."""
        return self.k_length - self.q_length


def problem(a: Arguments, q_block: int, k_block: int) -> Problem:
    """The call of these arguments, cut into these blocks, or into shorter ones where there is less to cut."""
    (batch, q_length, heads, dim), (_, k_length, kv_heads, v_dim) = a["query"].shape, a["value"].shape
    before, after = band(a["causal"], a["sliding_window"])
    drop = a["dropout_prob"]
    return Problem(
        q_block=min(q_block, whole_lanes(q_length)),
        k_block=min(k_block, whole_lanes(k_length)),
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_length=q_length,
        k_length=k_length,
        dim=dim,
        v_dim=v_dim,
        dtype=str(a["query"].dtype),
        scale=a["softmax_scale"],
        cap=a["logits_soft_cap"] or 0.0,
        before=before,
        after=after,
        packed=a["cum_seqlens_q"] is not None,
        segments=a["q_segment_ids"] is not None,
        sinks=a["softmax_aux"] is not None,
        bias=plane_kind(a["bias"]),
        mask=plane_kind(a["attention_mask"]),
        drop=drop,
        threshold=threshold(drop) if drop else 0,
    )


def plane_kind(plane: Any) -> str | None:
    """How a bias or mask lies; one number for all pairs is a row of keys that are alike."""
    if plane is None:
        return None
    _, _, queries, keys = plane.shape
    return "full" if queries > 1 and keys != 1 else "queries" if queries > 1 else "keys"


def blocks(length: int, block: int) -> int:
    """How many blocks there are, at least one."""
    return max(1, math.ceil(length / block))


def whole_lanes(length: int) -> int:
    """The length, filled up.

    >>> whole_lanes(0), whole_lanes(128), whole_lanes(129)
    (128, 128, 256)
    """
    return LANES * blocks(length, LANES)


def plane_dtype(dtype: Any) -> Any:
    """What a bias is read as: bfloat16 as it is, and all others as float32."""
    return dtype if dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)
