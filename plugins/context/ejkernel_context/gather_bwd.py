"""``context_attention_bwd`` by gathering the keys and values of all devices again.

The gradients of the keys are summed over the devices in float32, and each device gets those of its own keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, hookimpl

from .gather import (
    VERSION,
    Chunk,
    chunks,
    flat,
    gathered_keys,
    packed_lse,
    refuse_open_window,
)
from .layouts import by_device
from .mesh import check_inside
from .parts import apart, gradients, in_order, plain_gradients
from .rule import gather_rank

__all__ = ["VERSION"]

#: By the rule of this package.
PLATFORMS = {"cpu": gather_rank, "gpu": gather_rank, "tpu": gather_rank}
PARTS = ("flash_attention_bwd",)
#: The gradients that are summed over the devices.
OF_KEYS = ("key", "value")


@hookimpl
def heuristic_cfg(inv: Invocation) -> None:
    """A window that ends after its query is refused."""
    refuse_open_window(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> tuple[jax.Array, ...]:
    """The gradients that ``wrt`` names, in its order."""
    if inv["axis_size"] == 1:
        return plain_gradients(inv)
    check_inside(inv)
    key, value = apart(inv["key"], inv["value"])
    keys = gathered_keys(inv.with_arrays({"key": key, "value": value}))
    by_name = _causal(inv, keys) if inv["causal"] else _full(inv, keys)
    for name in OF_KEYS:
        if name in by_name:
            by_name[name] = _scattered(inv, by_name[name])
    return in_order(inv, by_name)


def _full(inv: Invocation, keys: Mapping[str, Any]) -> dict[str, jax.Array]:
    names = ("query", "q_segment_ids", "softmax_aux", "out", "lse", "d_out", "d_lse")
    return gradients(inv, inv["wrt"], **{name: inv[name] for name in names}, **keys)


def _causal(inv: Invocation, keys: Mapping[str, Any]) -> dict[str, jax.Array]:
    parts = [_of_chunk(inv, chunk, keys) for chunk in chunks(inv)]
    by_name = {name: sum(part[name] for part in parts[1:]) + parts[0][name] for name in inv["wrt"] if name != "query"}
    shape, kv_shape = inv["query"].shape, (inv["key"].shape[0], -1)
    if "query" in inv["wrt"]:
        rows = [part["query"].reshape(shape[0], -1, *shape[2:]) for part in parts]
        by_name["query"] = jnp.concatenate(rows, axis=1)
    for name in OF_KEYS:
        if name in by_name:
            by_name[name] = by_name[name].reshape(*kv_shape, *inv[name].shape[2:])
    return by_name


def _of_chunk(inv: Invocation, chunk: Chunk, keys: Mapping[str, Any]) -> dict[str, jax.Array]:
    rows = {name: chunk.rows(inv[name]) for name in ("out", "d_out")}
    lse = {name: chunk.rows(inv[name], 2) for name in ("lse", "d_lse")}
    return gradients(
        inv,
        inv["wrt"],
        softmax_aux=inv["softmax_aux"],
        **chunk.packed_call(inv, keys),
        **{name: None if array is None else flat(array) for name, array in rows.items()},
        **{name: None if array is None else packed_lse(array) for name, array in lse.items()},
    )


def _scattered(inv: Invocation, gradient: jax.Array) -> jax.Array:
    """The sum over the devices, of which each gets the rows of its own keys."""
    if inv["causal"] and inv["layout"] == "zigzag":
        gradient = by_device(gradient, inv["axis_size"], 1)
    summed: jax.Array
    if jax.typeof(gradient).sharding.mesh.explicit_axes:
        # JAX 0.12.0.1 cannot lower a reduce-scatter where other mesh axes are explicit and not manual.
        parts = jnp.stack(jnp.split(gradient, inv["axis_size"], axis=1))
        summed = jax.lax.all_to_all(parts, inv["axis"], split_axis=0, concat_axis=0, tiled=True).sum(0)
    else:
        summed = jax.lax.psum_scatter(gradient, inv["axis"], scatter_dimension=1, tiled=True)
    return summed
