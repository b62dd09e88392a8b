"""``context_attention`` by exchanging heads for sequence: each device has some heads of the whole sequence.

It is a plain call of ``flash_attention`` between exchanges, so that it takes whatever attention takes.
"""

from __future__ import annotations

from typing import Any

import jax

from ejkernel_core import Invocation, Unsupported, hookimpl

from .layouts import by_device, in_sequence
from .mesh import check_inside
from .parts import attention, plain_attention
from .positions import shard_index
from .rule import ULYSSES, indivisible_heads

#: The version of the kernel.
VERSION = 1
#: By the rule of this package.
PLATFORMS = {"cpu": ULYSSES, "gpu": ULYSSES, "tpu": ULYSSES}
PARTS = ("flash_attention",)


@hookimpl
def heuristic_cfg(inv: Invocation) -> None:
    """Heads that the devices do not divide are refused."""
    refuse_indivisible(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, jax.Array]:
    """The results for the queries of this device."""
    if inv["axis_size"] == 1:
        return plain_attention(inv)
    check_inside(inv)
    out, lse = attention(inv, **whole_call(inv))
    return to_sequence(inv, out), to_sequence(inv, lse, sequence=2, heads=1)


def refuse_indivisible(inv: Invocation) -> None:
    """Raise where the devices do not divide the heads."""
    reason = indivisible_heads(inv)
    if reason:
        raise Unsupported(f"{reason}; gather and ring need not divide them")


def whole_call(inv: Invocation) -> dict[str, Any]:
    """The arguments of attention over the whole sequence, for the heads of this device."""
    names = ("query", "key", "value")
    return {
        **{name: to_heads(inv, inv[name]) for name in names},
        **{name: _gathered(inv, inv[name]) for name in ("q_segment_ids", "kv_segment_ids")},
        "softmax_aux": own_heads(inv, inv["softmax_aux"]),
        "causal": inv["causal"],
        "sliding_window": inv["sliding_window"],
    }


def has_order(inv: Invocation) -> bool:
    """Whether the order of the sequence matters, and is not that of the devices."""
    return inv["layout"] == "zigzag" and (inv["causal"] or inv["sliding_window"] is not None)


def to_heads(inv: Invocation, array: Any, sequence: int = 1, heads: int = 2) -> Any:
    """An array of all heads of a shard as one of some heads of the whole sequence."""
    if array is None:
        return None
    whole = jax.lax.all_to_all(array, inv["axis"], split_axis=heads, concat_axis=sequence, tiled=True)
    return in_sequence(whole, inv["axis_size"], sequence) if has_order(inv) else whole


def to_sequence(inv: Invocation, array: Any, sequence: int = 1, heads: int = 2) -> Any:
    """The inverse of ``to_heads``."""
    if has_order(inv):
        array = by_device(array, inv["axis_size"], sequence)
    return jax.lax.all_to_all(array, inv["axis"], split_axis=sequence, concat_axis=heads, tiled=True)


def own_heads(inv: Invocation, sinks: Any) -> Any:
    """The sinks of the heads of this device."""
    if sinks is None:
        return None
    count = sinks.shape[0] // inv["axis_size"]
    return jax.lax.dynamic_slice_in_dim(sinks, shard_index(inv["axis"]) * count, count)


def _gathered(inv: Invocation, ids: Any) -> Any:
    if ids is None:
        return None
    whole = jax.lax.all_gather(ids, inv["axis"], axis=1, tiled=True)
    return in_sequence(whole, inv["axis_size"], 1) if has_order(inv) else whole
