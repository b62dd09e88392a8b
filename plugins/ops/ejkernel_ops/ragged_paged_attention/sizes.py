"""The arrays of a call by the sizes of its cache, as a command line says them."""

from __future__ import annotations

from ejkernel_ops.pages import check_three_axes, page_shapes, positive

from .tiles import metadata_length

Shapes = dict[str, tuple[tuple[int, ...], str | None]]


def shapes_of_sizes(
    query: tuple[int, ...],
    *,
    sequences: int,
    cached: int,
    page_size: int = 64,
    kv_heads: int | None = None,
    pages: int | None = None,
    pair: bool = False,
    cache_dtype: str | None = None,
    planned: bool = False,
) -> Shapes:
    """Of tables with room for ``cached`` tokens in each sequence, by default of as many pages as they have together.

    >>> shapes_of_sizes((3, 8, 64), sequences=3, cached=100, kv_heads=2)["block_tables"]
    ((3, 2), None)
    """
    check_three_axes("query", query, "(tokens, heads, head_dim)")
    positive("sequences", sequences)
    table = -(-positive("cached", cached) // positive("page_size", page_size))
    heads = query[1] if kv_heads is None else kv_heads
    cache = page_shapes(sequences * table if pages is None else pages, page_size, heads, query[2], pair)
    integers: dict[str, tuple[int, ...]] = {
        "kv_lens": (sequences,),
        "block_tables": (sequences, table),
        "query_start_loc": (sequences + 1,),
    }
    if planned:
        integers["metadata"] = (metadata_length(query[0], sequences),)
    return {name: (shape, cache_dtype) for name, shape in cache.items()} | {
        name: (shape, None) for name, shape in integers.items()
    }
