"""``moe_permute_matmul`` and its gradients by the best kernels of its parts."""

from __future__ import annotations

from ejkernel_core import plain_kernel

from . import parts

forward = plain_kernel(parts.forward, rank=50, parts=("moe_permute", "grouped_matmul"), version=1)
backward = plain_kernel(parts.gradients, rank=50, parts=("moe_permute", "grouped_matmul_bwd", "moe_combine"), version=1)
