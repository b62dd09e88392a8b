"""The calls that the kernel refuses."""

from __future__ import annotations

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.pages import pages_of
from ejkernel_ops.ragged_paged_attention.definition import output_dtype, value_dim
from ejkernel_triton.flash_attention._refusals import DTYPES, WIDEST
from ejkernel_triton.launch._requirements import require_card, require_float8


def check(inv: Invocation) -> None:
    """Raise `Unsupported` for a card, versions or arguments that the kernel does not support."""
    require_card(inv)
    query, pages = inv["query"], pages_of(inv)
    if str(output_dtype(inv)) not in DTYPES:
        raise Unsupported(f"the Triton kernel takes queries of {', '.join(DTYPES)} or 8 bits; not {query.dtype}")
    if str(pages[0].dtype) == "float8_e4m3fn":
        require_float8(inv)
    widest = max(query.shape[2], value_dim(inv))
    if widest > WIDEST:
        raise Unsupported(f"the Triton kernel takes head dims up to {WIDEST}, not {widest}")
    if query.shape[0] == 0:
        raise Unsupported("the Triton kernel takes no call without tokens")
