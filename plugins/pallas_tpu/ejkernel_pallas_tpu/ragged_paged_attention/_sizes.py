"""The sizes and options of a call, which are static while it is traced. They decide which code the kernel has."""

from __future__ import annotations

import attrs
import jax.numpy as jnp

from ejkernel_core import Invocation
from ejkernel_ops.flash_attention.geometry import block_count
from ejkernel_ops.flash_attention.tokens import band
from ejkernel_ops.ragged_paged_attention.definition import kv_heads, page_size, value_dim


@attrs.frozen
class Sizes:
    """One call, in tiles of queries and blocks of slots."""

    #: The tokens of a tile, and the slots of a block: some pages, or a part of one.
    q_tile: int
    k_block: int
    page_size: int
    kv_heads: int
    group: int
    dim: int
    v_dim: int
    #: Whether keys and values are in one array, the value of a head behind its key.
    is_interleaved: bool
    #: The dtype of queries and keys that are multiplied, and that of weights and values. Queries of 8 bits are exact in
    #: bfloat16, but weights are not.
    dtype: str
    value_dtype: str
    scale: float
    cap: float
    #: How many keys to the left and to the right of its own a query sees; None is without limit.
    left: int | None
    right: int | None
    has_sinks: bool
    has_scales: bool

    @property
    def rows(self) -> int:
        """Of a tile: the query heads that share a key head, and for each the tokens, in whole registers."""
        sublanes = 32 // int(jnp.dtype(self.dtype).itemsize)
        return sublanes * block_count(self.group * self.q_tile, sublanes)

    @property
    def slot_rows(self) -> int:
        """The rows that a slot has in one array of pages."""
        return self.kv_heads * (2 if self.is_interleaved else 1)

    @property
    def pages(self) -> int:
        """The copies that a block takes, each of a page or of a part of one."""
        return max(self.k_block // self.page_size, 1)

    @property
    def part(self) -> int:
        """The slots of a copy."""
        return min(self.page_size, self.k_block)


def sizes(inv: Invocation, q_tile: int, k_block: int) -> Sizes:
    left, right = band(inv["causal"], inv["sliding_window"])
    query, heads = inv["query"], kv_heads(inv)
    return Sizes(
        q_tile=q_tile,
        k_block=k_block,
        page_size=page_size(inv),
        kv_heads=heads,
        group=query.shape[1] // heads,
        dim=query.shape[2],
        v_dim=value_dim(inv),
        is_interleaved=inv["kv_pages"] is not None,
        dtype="float32" if query.dtype == jnp.float32 else "bfloat16",
        value_dtype="bfloat16" if query.dtype == jnp.bfloat16 else "float32",
        scale=inv["softmax_scale"],
        cap=inv["logits_soft_cap"] or 0.0,
        left=left,
        right=right,
        has_sinks=inv["softmax_aux"] is not None,
        has_scales=any(inv[name] is not None for name in ("q_scale", "k_scale", "v_scale")),
    )
