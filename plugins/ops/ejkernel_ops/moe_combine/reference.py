"""``moe_combine`` and its gradients by the definition: other kernels are compared with these."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from ejkernel_core import plain_kernel
from ejkernel_ops.moe_permute import definition

from . import operation


def _tokens(arguments: Mapping[str, Any]) -> jax.Array:
    return definition.combined(arguments["y"], arguments["token_order"], arguments["weights"])


forward = plain_kernel(_tokens, rank=0, version=1)
backward = plain_kernel(partial(operation.forward.gradients_by_jax, _tokens), rank=0, version=1)
