"""What is wrong in a kernel that runs here."""

from __future__ import annotations


class KernelError(RuntimeError):
    """A kernel did what it must not do. The message names the kernel, the program and the line."""


class Fault(Exception):
    """What one operation of a kernel did wrong, told where nothing is known of the kernel: a launch makes a KernelError
    of it.
    """
