"""The arguments of ``context_attention``: checked, and in the canonical form that kernels see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ejkernel_core.extend import vary_alike
from ejkernel_ops.flash_attention.arguments import prepare as prepare_attention
from ejkernel_ops.options import type_and_value

from .layouts import LAYOUTS
from .mesh import Names, axis_names, in_words, is_manual, shards_here

Arguments = dict[str, Any]

ARRAYS = ("query", "key", "value")
#: What attention has and this operation does not.
NOT_HERE: Arguments = {
    "bias": None,
    "attention_mask": None,
    "cum_seqlens_q": None,
    "cum_seqlens_k": None,
    "q_start": None,
    "kv_lengths": None,
    "kv_positions": None,
    "dropout_prob": 0.0,
    "dropout_seed": None,
}
#: The arguments that both have.
COMMON = (
    *ARRAYS,
    "q_segment_ids",
    "kv_segment_ids",
    "softmax_aux",
    "softmax_scale",
    "causal",
    "sliding_window",
    "logits_soft_cap",
    "return_lse",
)


def prepare(arguments: Arguments) -> tuple[Arguments, Callable[[tuple[Any, ...]], Any]]:
    """The canonical arguments of a call, after checks, and a function from the results to what the caller gets.

    The axis is a tuple of names, ``axis_size`` is the number of devices along it, and the rest is as in attention.
    """
    names = axis_names(arguments["axis"])
    check_layout(arguments["layout"])
    shards = shards_of(names, arguments["axis_size"])
    of_attention = {**NOT_HERE, **{name: arguments[name] for name in COMMON}}
    canonical, restore = prepare_attention({**of_attention, "sliding_window": None})
    # A window is as wide as the whole sequence at most.
    whole = {name: _whole(arguments[name], shards) for name in ARRAYS}
    without_ids = {**of_attention, **whole, "q_segment_ids": None, "kv_segment_ids": None, "softmax_aux": None}
    window = prepare_attention(without_ids)[0]["sliding_window"]
    prepared = {
        **{name: canonical[name] for name in COMMON},
        "axis": names,
        "axis_size": shards,
        "is_inside": is_manual(names),
        "layout": arguments["layout"],
        "sliding_window": window,
    }
    _check_lengths(prepared)
    return _varying(prepared), restore


def check_layout(layout: Any) -> None:
    """Raise for an unknown layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: takes {' or '.join(map(repr, LAYOUTS))}; got {type_and_value(layout)}")


def shards_of(names: Names, size: Any) -> int:
    """The number of devices along the axes: by the mesh, or as the caller says outside of ``shard_map``."""
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"axis_size: takes a number of devices, at least 1; got {type_and_value(size)}")
    here = shards_here(names)
    if here is None and size is None:
        axis = in_words(names)
        raise ValueError(
            f"axis: {axis} is not an axis of a shard_map around this call. Make the call inside jax.shard_map over "
            f"{axis}, or give ejkernel_context.context_attention a mesh=; for plan and explain, axis_size= is enough"
        )
    if here is not None and size not in (None, here):
        raise ValueError(f"axis_size: there are {here} devices along {in_words(names)}; got {size}")
    return here or int(size or 1)


def _whole(array: Any, shards: int) -> Any:
    """The shape of the whole sequence."""
    shape = tuple(array.shape)
    return jax.ShapeDtypeStruct((*shape[:1], *(length * shards for length in shape[1:2]), *shape[2:]), array.dtype)


def _check_lengths(arguments: Arguments) -> None:
    names, shards = arguments["axis"], arguments["axis_size"]
    lengths = {name: arguments[name].shape[1] for name in ("query", "key")}
    if arguments["layout"] == "zigzag":
        for name, length in lengths.items():
            check_even(name, length, names, shards)
    has_positions = arguments["causal"] or arguments["sliding_window"] is not None
    if has_positions and shards > 1 and lengths["query"] != lengths["key"]:
        raise ValueError(
            "key: with causal or sliding_window, the queries and the keys are of one sequence, so their shards have "
            f"one length; got {lengths['key']} keys and {lengths['query']} queries"
        )


def check_even(name: str, length: int, names: Names, shards: int) -> None:
    """Raise where a shard does not have two chunks of one length."""
    if length % 2 and shards > 1:
        raise ValueError(
            f"{name}: with layout='zigzag' each device has two chunks of one length, so the length of a shard is even; "
            f"got {length} tokens on each of the {shards} devices of {in_words(names)}. Pad the sequence to a multiple "
            f"of {2 * shards} tokens, or use layout='contiguous'"
        )


def _varying(arguments: Arguments) -> Arguments:
    """The arguments, with arrays whose types say that they differ between the devices of the axis.

    Otherwise JAX would take the results for equal on all devices, as those of equal arguments are.
    """
    if not arguments["axis"] or not is_manual(arguments["axis"]):
        return arguments
    *arrays, _ = vary_alike([*(arguments[name] for name in ARRAYS), jax.lax.axis_index(arguments["axis"])])
    return {**arguments, **dict(zip(ARRAYS, arrays, strict=True))}
