"""The calls that the kernels refuse."""

from __future__ import annotations

from ejkernel_core import Invocation, Unsupported
from ejkernel_triton.launch._requirements import require_card

#: Larger head dims do not fit into registers.
WIDEST = 256
DTYPES = ("float16", "bfloat16", "float32")


def check(inv: Invocation) -> None:
    """Raise ``Unsupported`` for a card, versions or arguments that the kernels do not support."""
    require_card(inv)
    query, value = inv["query"], inv["value"]
    if str(query.dtype) not in DTYPES:
        raise Unsupported(f"the Triton kernels take {', '.join(DTYPES)}; not {query.dtype}")
    widest = max(query.shape[3], value.shape[3])
    if widest > WIDEST:
        raise Unsupported(f"the Triton kernels take head dims up to {WIDEST}, not {widest}")
