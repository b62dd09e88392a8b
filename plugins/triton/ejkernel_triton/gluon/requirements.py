"""What every Gluon kernel for Hopper needs, checked before anything runs."""

from __future__ import annotations

import sys

from ejkernel_core import Invocation, Unsupported
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability

#: The types that the matrix units multiply here.
DTYPES = ("float16", "bfloat16")
#: The copy engine moves multiples of 16 bytes: this many numbers.
ELEMENTS = 8


def require_hopper(inv: Invocation) -> None:
    """Raise where this card cannot run the kernels, or where these versions cannot compile them."""
    compute_capability = capability(inv)
    if compute_capability != (9, 0):
        major, minor = compute_capability or (0, 0)
        raise Unsupported(f"the Gluon kernels are for compute capability 9.0 (Hopper); this GPU has {major}.{minor}")
    reason = _unavailable_reason()
    if reason is not None:
        raise Unsupported(reason)


def _unavailable_reason() -> str | None:
    """Why these versions cannot compile the kernels; None where they can."""
    if _jax_triton.version() < (0, 4, 1):
        newer = "" if sys.version_info >= (3, 12) else ", which needs Python 3.12"
        return f'the Gluon kernels need jax-triton 0.4{newer}: pip install "jax-triton>=0.4.1"'
    unknown = _jax_triton.no_descriptors_reason()
    return None if unknown is None else f"the Gluon kernels need descriptions for the copy engine: {unknown}"
