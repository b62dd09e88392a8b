"""``linear_log_probs`` and its gradients by the definition: other kernels are compared with these."""

from __future__ import annotations

from functools import partial

from ejkernel_core import plain_kernel

from . import definition, operation

forward = plain_kernel(definition.forward, rank=0, version=1)
backward = plain_kernel(partial(operation.forward.gradients_by_jax, definition.forward), rank=0, version=1)
