"""The calls that the kernel refuses; `flash_attention.triton_decode` takes them."""

from __future__ import annotations

from ejkernel_core import Invocation, Unsupported
from ejkernel_triton.flash_attention_decode import _refusals
from ejkernel_triton.gluon.requirements import DTYPES, ELEMENTS, require_hopper


def check(inv: Invocation) -> None:
    """Raise `Unsupported` for a card, versions or arguments that the kernel does not support."""
    _refusals.check(inv)
    require_hopper(inv)
    query, value = inv["query"], inv["value"]
    if str(query.dtype) not in DTYPES:
        raise Unsupported(f"the Gluon decode kernel takes {' and '.join(DTYPES)}; not {query.dtype}")
    for dim in (query.shape[3], value.shape[3]):
        if dim % ELEMENTS:
            raise Unsupported(f"the Gluon decode kernel takes multiples of {ELEMENTS} for head dims; not {dim}")
    if inv["kv_positions"] is not None:
        raise Unsupported("the Gluon decode kernel takes no kv_positions")
