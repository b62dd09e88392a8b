"""The TPU kernels without a TPU: interpreted on the CPU."""

from __future__ import annotations

from ._registry import interpreted_registry

__all__ = ["interpreted_registry"]
