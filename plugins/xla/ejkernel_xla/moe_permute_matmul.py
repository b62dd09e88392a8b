"""``moe_permute_matmul`` and its gradients by the parts of this backend."""

from __future__ import annotations

from functools import partial

from ejkernel_core import plain_kernel
from ejkernel_ops.moe_permute_matmul import parts
from ejkernel_ops.symbolic import refuse_symbolic

forward = plain_kernel(
    partial(parts.forward, backend="xla"),
    rank=10,
    check=refuse_symbolic,
    parts=("moe_permute", "grouped_matmul"),
    version=1,
)
backward = plain_kernel(
    partial(parts.gradients, backend="xla"),
    rank=10,
    parts=("moe_permute", "grouped_matmul_bwd", "moe_combine"),
    version=1,
)
