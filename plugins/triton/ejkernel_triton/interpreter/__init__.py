"""Triton kernels without a GPU: interpreted, with checks of every access, and compiled for a card."""

from __future__ import annotations

from ._compiled import Compiled, compiled_for, kernels_in
from ._faults import KernelError
from ._lowering import interpreted
from ._registry import interpreted_registry

__all__ = ["Compiled", "KernelError", "compiled_for", "interpreted", "interpreted_registry", "kernels_in"]
