"""The updated pages by the definition: other kernels are compared with these."""

from __future__ import annotations

from ejkernel_core import plain_kernel

from . import definition

forward = plain_kernel(definition.joined, rank=0, version=1)
pair = plain_kernel(definition.pair, rank=0, version=1)
