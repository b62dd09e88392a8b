"""The losses, their sum and all gradients by the definition: other kernels are compared with these."""

from __future__ import annotations

from functools import partial
from typing import Any

from ejkernel_core import Invocation, plain_kernel

from . import definition, operation
from .axes import is_of_sum_alone


def _gradients(inv: Invocation) -> Any:
    losses = partial(definition.forward, has_lse=definition.has_lse_of(inv["d_lse"]))
    return operation.forward.gradients_by_jax(losses, inv)


def _gradients_of_sum(inv: Invocation) -> Any:
    """Those that the forward made, multiplied; where there are cotangents of others, by JAX."""
    return definition.multiples(inv) if is_of_sum_alone(inv) else gradients_of_sum_by_jax(inv)


def gradients_of_sum_by_jax(inv: Invocation) -> Any:
    total = partial(definition.sum_forward, has_lse=definition.has_lse_of(inv["d_lse"]))
    return operation.total.gradients_by_jax(total, inv)


forward = plain_kernel(lambda inv: definition.forward(inv, has_lse=inv.needs("lse")), rank=0, version=1)
backward = plain_kernel(_gradients, rank=0, version=1)
total = plain_kernel(lambda inv: definition.sum_forward(inv, has_lse=inv.needs("lse")), rank=0, version=1)
total_backward = plain_kernel(_gradients_of_sum, rank=0, version=1)
