"""The calls that the decode kernel refuses; the general one takes them."""

from __future__ import annotations

from ejkernel_core import Invocation, Unsupported
from ejkernel_pallas_tpu.flash_attention import _refusals
from ejkernel_pallas_tpu.launch._devices import check_device

#: With more, the rows of a head fill the tiles of the general kernel.
MOST_QUERIES = 16
ABSENT = ("bias", "attention_mask", "q_segment_ids", "cum_seqlens_q")


def check(inv: Invocation) -> None:
    """Raise `Unsupported` for a device or arguments that the kernel does not support."""
    check_device(inv)
    check_arguments(inv)


def check_arguments(inv: Invocation) -> None:
    """Raise for arguments that the kernel does not support, interpreted or not."""
    _refusals.check_arguments(inv)
    query, key = inv["query"], inv["key"]
    if query.shape[1] > MOST_QUERIES:
        raise Unsupported(f"the decode kernel takes up to {MOST_QUERIES} queries; not {query.shape[1]}")
    for name in ABSENT:
        if inv[name] is not None:
            raise Unsupported(f"the decode kernel takes no {name}")
    if inv["dropout_prob"]:
        raise Unsupported("the decode kernel does no dropout")
    if 0 in query.shape or 0 in key.shape:
        raise Unsupported("the decode kernel takes no arrays without elements")
