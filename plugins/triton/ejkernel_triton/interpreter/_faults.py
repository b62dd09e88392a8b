"""The errors of interpreted kernels."""

from __future__ import annotations


class KernelError(RuntimeError):
    """A kernel has an error. The message names the kernel, the program and the line."""


class Fault(Exception):
    """An error of one operation, which does not name the kernel: the launch raises it as a `KernelError`."""
