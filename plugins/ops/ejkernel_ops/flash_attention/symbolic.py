"""Sizes that are not known while a program is exported: ``jax.export.symbolic_shape``."""

from __future__ import annotations

from typing import Any

from ejkernel_core import Invocation, Unsupported


def is_symbolic(size: Any) -> bool:
    return not isinstance(size, int)


def refuse_symbolic(inv: Invocation) -> None:
    """For kernels that cut a call into blocks: how many there are is a part of the program."""
    for name, value in inv.arguments.items():
        sizes = [size for size in getattr(value, "shape", ()) if is_symbolic(size)]
        if sizes:
            raise Unsupported(
                f"blocks are cut for sizes that are known, and {name} has the symbolic {sizes[0]}: "
                "backend='reference' takes it, or export the call for each size"
            )
