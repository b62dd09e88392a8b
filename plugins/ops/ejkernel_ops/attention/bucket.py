"""Which attention calls are alike as far as tuning goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ejkernel_core import Axes


def bucket(axes: Axes, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with every batch and length rounded up to a power of two, and of numbers only whether they act.

    >>> import jax
    >>> from ejkernel_ops.attention.axes import AXES
    >>> query = jax.ShapeDtypeStruct((3, 1000, 8, 64), "float32")
    >>> bucket(AXES, {"query": query, "softmax_scale": 0.1, "logits_soft_cap": 30.0, "return_lse": True})
    {'query': ShapeDtypeStruct(shape=(4, 1024, 8, 64), dtype=float32), 'logits_soft_cap': True}
    """
    kept = {name: v for name, v in axes.bucket(arguments).items() if name not in ("softmax_scale", "return_lse")}
    return {name: bool(v) if name in ("logits_soft_cap", "dropout_prob") else v for name, v in kept.items()}
