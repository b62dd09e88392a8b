"""``rms_norm`` and ``layer_norm`` by their definition: XLA fuses them with what comes before and after."""

from __future__ import annotations

from functools import partial

from ejkernel_core import plain_kernel
from ejkernel_ops.rms_norm import definition

rms_norm = plain_kernel(partial(definition.forward, centered=False), rank=10, version=1)
rms_norm_bwd = plain_kernel(partial(definition.gradients, centered=False), rank=10, version=1)
rms_norm_quantized = plain_kernel(partial(definition.quantized, centered=False), rank=10, version=1)
layer_norm = plain_kernel(partial(definition.forward, centered=True), rank=10, version=1)
layer_norm_bwd = plain_kernel(partial(definition.gradients, centered=True), rank=10, version=1)
layer_norm_quantized = plain_kernel(partial(definition.quantized, centered=True), rank=10, version=1)
