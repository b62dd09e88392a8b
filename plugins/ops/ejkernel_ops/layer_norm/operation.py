"""The operations ``layer_norm``, ``layer_norm_bwd`` and ``layer_norm_quantized``."""

from __future__ import annotations

from ejkernel_ops.rms_norm.operation import operations

forward, backward, quantized = operations("layer_norm", centered=True)
