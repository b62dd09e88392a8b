"""What the kernels do not do, said before anything is committed."""

from __future__ import annotations

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.flash_attention.symbolic import refuse_symbolic
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability

#: Wider heads would not fit into registers.
WIDEST = 256
DTYPES = ("float16", "bfloat16", "float32")


def check(inv: Invocation) -> None:
    """Raise where this card, these versions, or these arguments are not for Triton."""
    missing = _jax_triton.missing()
    if missing is not None:
        raise Unsupported(missing)
    known = capability(inv)
    if known is None and inv.device_kind is not None:
        raise Unsupported(f"the Triton kernels are for NVIDIA GPUs, and {inv.device_kind} is not known as one")
    if known is None:
        raise Unsupported(
            "Triton compiles for one card, and none is here: say which is meant, by "
            "jax.sharding.use_abstract_mesh with an AbstractDevice('NVIDIA H100', None, 'cuda')"
        )
    if known < (8, 0):
        major, minor = known
        raise Unsupported(
            f"the Triton kernels need compute capability 8.0 (Ampere) or later; this GPU has {major}.{minor}"
        )
    refuse_symbolic(inv)
    query, value = inv["query"], inv["value"]
    if str(query.dtype) not in DTYPES:
        raise Unsupported(f"the Triton kernels take {', '.join(DTYPES)}; not {query.dtype}")
    widest = max(query.shape[3], value.shape[3])
    if widest > WIDEST:
        raise Unsupported(f"the Triton kernels take head dims up to {WIDEST}, not {widest}")
