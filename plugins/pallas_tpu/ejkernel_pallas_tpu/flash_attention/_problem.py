"""The sizes and options of a call, which are static while it is traced. They decide which code a kernel has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import jax.numpy as jnp

from ejkernel_ops.flash_attention.dropout import threshold
from ejkernel_ops.flash_attention.geometry import block_count
from ejkernel_ops.flash_attention.tokens import band

Arguments = Mapping[str, Any]

#: How many numbers lie side by side in a TPU's vector register. Every block of tokens is a multiple of it.
LANES = 128


@attrs.frozen
class Problem:
    """One call, split into blocks of queries and of keys."""

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
    #: How many keys to the left and to the right of its own a query sees; None is without limit.
    left: int | None
    right: int | None
    packed: bool
    segments: bool
    #: Whether scalar memory has the position of the first query of each batch entry.
    positions: bool
    #: What says which slots hold no key: "lengths", in scalar memory, "positions", -1 there, or None if all hold one.
    empty: str | None
    sinks: bool
    #: The layouts of bias and mask, or None without: "full" has a number for each query and key, "keys" has one row
    #: for all queries, and "queries" one number for all keys.
    bias: str | None
    mask: str | None
    dropout: float
    threshold: int

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return self.heads // self.kv_heads

    @property
    def q_count(self) -> int:
        return block_count(self.q_length, self.q_block)

    @property
    def k_count(self) -> int:
        return block_count(self.k_length, self.k_block)


def problem(a: Arguments, q_block: int, k_block: int) -> Problem:
    """The call of these arguments, in blocks of these sizes, or shorter ones where the call itself is shorter."""
    (batch, q_length, heads, dim), (_, k_length, kv_heads, v_dim) = a["query"].shape, a["value"].shape
    left, right = band(a["causal"], a["sliding_window"])
    dropout = a["dropout_prob"]
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
        left=left,
        right=right,
        packed=a["cum_seqlens_q"] is not None,
        segments=a["q_segment_ids"] is not None,
        positions=a["q_start"] is not None,
        empty="positions" if a["kv_positions"] is not None else "lengths" if a["kv_lengths"] is not None else None,
        sinks=a["softmax_aux"] is not None,
        bias=layout(a["bias"]),
        mask=layout(a["attention_mask"]),
        dropout=dropout,
        threshold=threshold(dropout) if dropout else 0,
    )


def layout(x: Any) -> str | None:
    """The layout of a bias or mask. A single number has that of a row of keys."""
    if x is None:
        return None
    _, _, queries, keys = x.shape
    return "full" if queries > 1 and keys != 1 else "queries" if queries > 1 else "keys"


def whole_lanes(length: int) -> int:
    """The length, rounded up to a multiple of the lanes.

    >>> whole_lanes(0), whole_lanes(128), whole_lanes(129)
    (128, 128, 256)
    """
    return LANES * block_count(length, LANES)


def bias_dtype(dtype: Any) -> Any:
    """The dtype that a bias is read in: bfloat16 as it is, and all others as float32."""
    return dtype if dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)
