"""``grouped_matmul_bwd`` by the two products of this backend."""

from __future__ import annotations

from functools import partial

from ejkernel_core import plain_kernel
from ejkernel_ops.grouped_matmul.gradients import gradients

backward = plain_kernel(
    partial(gradients, backend="xla"), rank=10, parts=("grouped_matmul", "grouped_matmul_d_rhs"), version=1
)
