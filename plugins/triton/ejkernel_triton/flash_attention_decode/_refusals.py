"""The calls that the kernel refuses; the other kernels in Triton take them."""

from __future__ import annotations

from ejkernel_core import Invocation, Unsupported
from ejkernel_triton.flash_attention._refusals import DTYPES, WIDEST
from ejkernel_triton.launch._requirements import require_card

#: With more, the ordinary kernels have enough programs.
MOST_QUERIES = 16
ABSENT = ("bias", "attention_mask", "q_segment_ids", "cum_seqlens_q")


def check(inv: Invocation) -> None:
    """Raise `Unsupported` for a card, versions or arguments that the kernel does not support."""
    require_card(inv)
    query, key = inv["query"], inv["key"]
    if str(query.dtype) not in DTYPES:
        raise Unsupported(f"the decode kernel takes {', '.join(DTYPES)}; not {query.dtype}")
    widest = max(query.shape[3], inv["value"].shape[3])
    if widest > WIDEST:
        raise Unsupported(f"the decode kernel takes head dims up to {WIDEST}, not {widest}")
    if query.shape[1] > MOST_QUERIES:
        raise Unsupported(f"the decode kernel takes up to {MOST_QUERIES} queries; not {query.shape[1]}")
    for name in ABSENT:
        if inv[name] is not None:
            raise Unsupported(f"the decode kernel takes no {name}")
    if inv["dropout_prob"]:
        raise Unsupported("the decode kernel does no dropout")
    if 0 in query.shape or 0 in key.shape:
        raise Unsupported("the decode kernel takes no arrays without elements")
