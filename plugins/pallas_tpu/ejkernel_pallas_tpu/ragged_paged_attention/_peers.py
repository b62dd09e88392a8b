"""JAX's own kernel, which the estimated time of this one is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from ejkernel_core import Example
from ejkernel_ops.pages import EIGHT_BITS
from ejkernel_pallas_tpu.testing import Peer

#: Pages of a block of keys, by their slots, and the queries of a block.
SLOTS = (256, 512, 1024)
QUERIES = (8, 32, 64)


def peers(example: Example) -> Iterator[Peer]:
    """With blocks of its own kind and of ours, of which the quickest counts."""
    arguments = example.abstract()
    pages = arguments.get("kv_pages")
    if pages is None or pages.dtype in EIGHT_BITS:
        return
    window = arguments.get("sliding_window")
    options = {"sm_scale": arguments["query"].shape[2] ** -0.5, "sliding_window": window and window[0] + 1}
    most = max(arguments.get("max_query_len") or 1, QUERIES[0])
    variants = {
        f"{slots} slots, {queries} queries": _call(slots // pages.shape[1], queries, options)
        for slots in SLOTS
        for queries in QUERIES
        if queries <= most
    }
    yield Peer("jax", variants, 1 / 1.05)


def _call(pages: int, queries: int, options: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    def run(arrays: Mapping[str, Any]) -> Any:
        names = ("query", "kv_pages", "kv_lens", "block_tables", "query_start_loc")
        count = jnp.full(1, arrays["kv_lens"].shape[0], jnp.int32)
        return ragged_paged_attention(
            *(arrays[name] for name in names),
            count,
            num_kv_pages_per_block=pages,
            num_queries_per_block=queries,
            vmem_limit_bytes=100 << 20,
            **options,
        )

    return run
