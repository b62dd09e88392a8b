"""The calls that the Gluon kernels refuse; the portable kernels take them."""

from __future__ import annotations

from ejkernel_core import Invocation, Unsupported
from ejkernel_triton.flash_attention import _refusals
from ejkernel_triton.gluon.requirements import DTYPES, ELEMENTS, require_hopper

LEAST_SCALE = 1e-30
#: Masked logits are a multiple of the cap: down to this cap their weights are 0.
LEAST_CAP = 1e-9


def check(inv: Invocation) -> None:
    """Raise `Unsupported` for a card, versions or arguments that the kernels do not support."""
    _refusals.check(inv)
    require_hopper(inv)
    query, key, value = inv["query"], inv["key"], inv["value"]
    if str(query.dtype) not in DTYPES:
        raise Unsupported(f"the Gluon kernels take {' and '.join(DTYPES)}; not {query.dtype}")
    dim = query.shape[3]
    if value.shape[3] != dim:
        raise Unsupported(f"the Gluon kernels take one head dim; not {dim} for queries and {value.shape[3]} for values")
    if dim % ELEMENTS:
        raise Unsupported(f"the Gluon kernels take multiples of {ELEMENTS} for head dims; not {dim}")
    if 0 in query.shape or 0 in key.shape:
        raise Unsupported("the Gluon kernels take no arrays without elements")
    for name in ("bias", "attention_mask"):
        if inv[name] is not None:
            raise Unsupported(f"the Gluon kernels take no {name}")
    # Masked logits are -inf before they are multiplied by these, which may not change the sign.
    if not inv["softmax_scale"] > LEAST_SCALE:
        raise Unsupported(f"the Gluon kernels take a positive softmax_scale; not {inv['softmax_scale']}")
    if inv["logits_soft_cap"] is not None and not inv["logits_soft_cap"] > LEAST_CAP:
        raise Unsupported(f"the Gluon kernels take no logits_soft_cap of {inv['logits_soft_cap']}")
    if inv["dropout_prob"]:
        raise Unsupported("the Gluon kernels do no dropout")
