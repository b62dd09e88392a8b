"""Attention over the whole sequence by its definition, for the queries of a device. Other kernels are compared with it.

It differs from them in how it says what a query sees: by the positions of queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel_core
from ejkernel_core import plain_kernel

from . import operation
from .parts import OPTIONS
from .positions import shard_index, shard_positions


def dense_attention(arguments: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    """The results through the whole matrix of scores."""
    names = ("query", "q_segment_ids", "softmax_aux", *OPTIONS)
    of_keys = {name: _gathered(arguments, arguments[name]) for name in ("key", "value", "kv_segment_ids")}
    call = {**{name: arguments[name] for name in names}, **of_keys}
    out, lse = ejkernel_core.call(
        "flash_attention",
        **{name: value for name, value in call.items() if value is not None},
        attention_mask=_visible(arguments),
        return_lse=True,
        backend="reference",
    )
    return out, lse


def _gathered(arguments: Mapping[str, Any], array: Any) -> Any:
    if array is None or arguments["axis_size"] == 1:
        return array
    return jax.lax.all_gather(array, arguments["axis"], axis=1, tiled=True)


def _visible(arguments: Mapping[str, Any]) -> jax.Array:
    """Which queries of this device see which keys: (1, 1, queries, keys)."""
    shards, layout = arguments["axis_size"], arguments["layout"]
    length, kv_length = (arguments[name].shape[1] for name in ("query", "key"))
    own = shard_positions(length, layout, shards, shard_index(arguments["axis"]) if shards > 1 else 0)
    places = [shard_positions(kv_length, layout, shards, shard) for shard in range(shards)]
    if shards == 1:  # as in attention, where the last query is at the position of the last key
        own = own + kv_length - length
    distance = jnp.concatenate(places) - own[:, None]
    is_visible = jnp.ones(distance.shape, bool)
    if arguments["causal"]:
        is_visible &= distance <= 0
    if arguments["sliding_window"] is not None:
        left, right = arguments["sliding_window"]
        is_visible &= (-left <= distance) & (distance <= right)
    return is_visible[None, None]


forward = plain_kernel(dense_attention, rank=0, version=1)
#: Without ``out`` and ``lse``, derivatives of any order are right.
backward = plain_kernel(partial(operation.forward.gradients_by_jax, dense_attention), rank=0, version=1)
