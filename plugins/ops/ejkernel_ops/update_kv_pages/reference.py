"""The updated pages by the definition: other kernels are compared with these."""

from __future__ import annotations

from ejkernel_core import plain_kernel

from . import definition

forward = plain_kernel(definition.joined, 0, version=1)
pair = plain_kernel(definition.pair, 0, version=1)
