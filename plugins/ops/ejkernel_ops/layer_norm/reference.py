"""``layer_norm``, its gradients and its results of 8 bits by the definition: other kernels are compared with these."""

from __future__ import annotations

from functools import partial

from ejkernel_core import plain_kernel
from ejkernel_ops.rms_norm import definition

from . import operation

_normalized = partial(definition.forward, centered=True)

forward = plain_kernel(_normalized, rank=0, version=1)
backward = plain_kernel(partial(operation.forward.gradients_by_jax, _normalized), rank=0, version=1)
quantized = plain_kernel(partial(definition.quantized, centered=True), rank=0, version=1)
