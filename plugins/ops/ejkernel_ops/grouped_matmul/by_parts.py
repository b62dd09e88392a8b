"""The gradients of the products of groups by two products of the best kernels."""

from __future__ import annotations

from ejkernel_core import plain_kernel

from .gradients import gradients

backward = plain_kernel(gradients, rank=50, parts=("grouped_matmul", "grouped_matmul_d_rhs"), version=1)
