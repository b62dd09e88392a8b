"""Kernels for TPUs without a TPU: interpreted on the CPU, and compiled by the compiler for TPUs."""

from __future__ import annotations

from ._peers import Peer
from ._registry import interpreted_registry

__all__ = ["Peer", "interpreted_registry"]
