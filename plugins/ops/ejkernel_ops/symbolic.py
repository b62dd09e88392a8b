"""Sizes that are unknown while a program is exported: ``jax.export.symbolic_shape``."""

from __future__ import annotations

from typing import Any

from ejkernel_core import Invocation, Unsupported


def is_symbolic(size: Any) -> bool:
    """Whether a size is a symbolic expression, and not a number."""
    return not isinstance(size, int)


def refuse_symbolic(inv: Invocation) -> None:
    """Raise `Unsupported` if a size is symbolic: for kernels whose grid or blocks depend on the sizes."""
    for name, value in inv.arguments.items():
        for size in getattr(value, "shape", ()):
            if is_symbolic(size):
                raise Unsupported(
                    f"{name} has the symbolic size {size}, but this kernel takes numbers only: use "
                    "backend='reference', or export the call for each size"
                )
