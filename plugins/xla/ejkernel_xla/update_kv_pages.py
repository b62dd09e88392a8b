"""The updated pages by scatters, which XLA does in place."""

from __future__ import annotations

from ejkernel_core import plain_kernel
from ejkernel_ops.update_kv_pages import definition

forward = plain_kernel(definition.joined, rank=10, version=1)
pair = plain_kernel(definition.pair, rank=10, version=1)
