"""Which attention calls are alike as far as tuning goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

#: The axes that count batches, sequences or tokens.
_COUNTS = {
    "query": (0, 1),
    "key": (0, 1),
    "value": (0, 1),
    "out": (0, 1),
    "d_out": (0, 1),
    "lse": (0, 2),
    "d_lse": (0, 2),
    "bias": (0, 2, 3),
    "attention_mask": (0, 2, 3),
    "q_segment_ids": (0, 1),
    "kv_segment_ids": (0, 1),
    "cum_seqlens_q": (0,),
    "cum_seqlens_k": (0,),
}


def bucket(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with every batch and length rounded up to a power of two, and of numbers only whether they act.

    >>> query = jax.ShapeDtypeStruct((3, 1000, 8, 64), "float32")
    >>> bucket({"query": query, "softmax_scale": 0.1, "logits_soft_cap": 30.0, "return_lse": True, "causal": True})
    {'query': ShapeDtypeStruct(shape=(4, 1024, 8, 64), dtype=float32), 'logits_soft_cap': True, 'causal': True}
    """
    kept = {name: value for name, value in arguments.items() if name not in ("softmax_scale", "return_lse")}
    for name in ("logits_soft_cap", "dropout_prob"):
        if name in kept:
            kept[name] = bool(kept[name])
    for name, axes in _COUNTS.items():
        if kept.get(name) is not None:
            kept[name] = _rounded(kept[name], axes)
    return kept


def _rounded(array: Any, axes: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    shape = [_power_of_two(size) if axis in axes else size for axis, size in enumerate(array.shape)]
    return jax.ShapeDtypeStruct(shape, array.dtype)


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
