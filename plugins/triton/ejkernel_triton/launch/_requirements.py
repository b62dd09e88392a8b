"""What every Triton kernel needs of the installed packages, the card and the call, checked before anything runs."""

from __future__ import annotations

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.symbolic import refuse_symbolic
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability


def require_card(inv: Invocation) -> None:
    """Raise where these versions or this card cannot run Triton kernels, or where sizes are symbolic."""
    reason = _jax_triton.unavailable_reason()
    if reason is not None:
        raise Unsupported(reason)
    own = capability(inv)
    if own is None and inv.device_kind is not None:
        raise Unsupported(f"the Triton kernels are for NVIDIA GPUs, and {inv.device_kind} is not known as one")
    if own is None:
        raise Unsupported(
            "Triton compiles for one card, and none is here: say which is meant, by "
            "jax.sharding.use_abstract_mesh with an AbstractDevice('NVIDIA H100', None, 'cuda')"
        )
    if own < (8, 0):
        major, minor = own
        raise Unsupported(
            f"the Triton kernels need compute capability 8.0 (Ampere) or later; this GPU has {major}.{minor}"
        )
    refuse_symbolic(inv)


def require_float8(inv: Invocation) -> None:
    """Raise where Triton does not round to float8_e4m3fn."""
    own = capability(inv)
    if own is not None and own < (8, 9):
        major, minor = own
        raise Unsupported(
            f"Triton rounds to float8_e4m3fn from compute capability 8.9 (Ada) on; this GPU has {major}.{minor}"
        )
