"""The calls that the kernel refuses; `ragged_paged_attention.triton` takes them."""

from __future__ import annotations

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.pages import EIGHT_BITS, pages_of
from ejkernel_ops.ragged_paged_attention.definition import page_size, value_dim
from ejkernel_triton.gluon.requirements import DTYPES, ELEMENTS, require_hopper
from ejkernel_triton.ragged_paged_attention import _refusals
from ejkernel_triton.ragged_paged_attention._tiling import group
from ejkernel_triton.ragged_paged_attention_sm90._tiling import most_rows

#: The copy engine permutes eight rows at a time. Pages divide the largest block, or are a multiple of it.
LEAST_PAGE, BLOCK = 8, 128
#: The sum of more depends on its order, which is not the same in both launches.
MOST_SINKS = 2


def check(inv: Invocation) -> None:
    """Raise `Unsupported` for a card, versions or arguments that the kernel does not support."""
    _refusals.check(inv)
    require_hopper(inv)
    query, size = inv["query"], page_size(inv)
    if str(query.dtype) not in DTYPES:
        raise Unsupported(f"the Gluon kernel takes queries of {' and '.join(DTYPES)}; not {query.dtype}")
    dtype = pages_of(inv)[0].dtype
    if dtype not in (query.dtype, *EIGHT_BITS):
        raise Unsupported(f"the Gluon kernel takes pages of the query's dtype or of 8 bits; not {dtype}")
    elements = ELEMENTS * 2 // dtype.itemsize
    for dim in (query.shape[2], value_dim(inv)):
        if dim % elements:
            of = " for pages of 8 bits" if dtype in EIGHT_BITS else ""
            raise Unsupported(f"the Gluon kernel takes multiples of {elements} for head dims{of}; not {dim}")
    if size < LEAST_PAGE or (size & (size - 1) and size % BLOCK):
        raise Unsupported(
            f"the Gluon kernel takes pages of {LEAST_PAGE}, 16, 32 or 64 tokens, or a multiple of {BLOCK}; not {size}"
        )
    if group(inv) > most_rows(inv):
        raise Unsupported(f"the Gluon kernel takes up to {most_rows(inv)} heads for a key head; not {group(inv)}")
    sinks = inv["softmax_aux"]
    if inv["split_size"] is not None and sinks is not None and sinks.shape[1] > MOST_SINKS:
        raise Unsupported(
            f"with split_size, the Gluon kernel takes up to {MOST_SINKS} sinks of a head; not {sinks.shape[1]}"
        )
