"""``moe_permute_matmul`` and its gradients by the definition: other kernels are compared with these."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from ejkernel_core import plain_kernel
from ejkernel_ops.grouped_matmul import definition as grouped_matmul
from ejkernel_ops.moe_permute import definition as moe_permute

from . import operation
from .parts import product_arguments


def _product(arguments: Mapping[str, Any]) -> jax.Array:
    """The result, rounded once."""
    rows = moe_permute.permuted(arguments["x"], arguments["token_order"], arguments["k"])
    return grouped_matmul.forward(product_arguments(arguments, rows))


forward = plain_kernel(_product, rank=0, version=1)
backward = plain_kernel(partial(operation.forward.gradients_by_jax, _product), rank=0, version=1)
