"""Launching Pallas kernels on TPUs, for kernels of any operation."""

from __future__ import annotations

from ._arrays import Operand, Output, Scratch, Semaphores
from ._launch import Launch, grid_indices

__all__ = ["Launch", "Operand", "Output", "Scratch", "Semaphores", "grid_indices"]
