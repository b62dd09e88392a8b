"""The arguments of both operations: checked, in the form that kernels see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_ops.arrays import check_floats, check_integers
from ejkernel_ops.pages import check_pages, check_scales, int32, one_integer, pages_of, scale_of_heads

Arguments = dict[str, Any]
Restore = Callable[[tuple[Any, ...]], Any]


def prepare(arguments: Arguments) -> tuple[Arguments, Restore]:
    """Check the arguments. Kernels get a slot for each token, int32, and scales and ``first_page`` with an axis."""
    _check_tokens(arguments)
    check_pages(arguments)
    dtype = pages_of(arguments)[0].dtype
    canonical = {
        **arguments,
        "slot_mapping": slots(arguments),
        "first_page": one_integer("first_page", arguments["first_page"]),
        "num_slices": None,
        **{name: scale_of_heads(name, arguments[name], dtype) for name in ("k_scale", "v_scale")},
    }
    return canonical, lambda results: results[0] if len(results) == 1 else tuple(results)


def _check_tokens(arguments: Mapping[str, Any]) -> None:
    for name in ("key", "value"):
        check_floats(name, arguments[name])
        if arguments[name].ndim != 3:
            raise ValueError(f"{name}: takes (tokens, kv heads, head_dim); got shape {arguments[name].shape}")
    key, value = arguments["key"].dtype, arguments["value"].dtype
    if key != value:
        raise TypeError(f"value: takes the key's dtype, {key}; got {value}")


def slots(arguments: Mapping[str, Any]) -> jax.Array:
    """The slot of each token, negative for none, as int32."""
    mapping, count = arguments["slot_mapping"], arguments["num_slices"]
    check_integers("slot_mapping", mapping)
    if mapping.ndim == 1:
        if count is not None:
            raise ValueError("num_slices: is for slices; slot_mapping has a slot for each token")
        return int32(mapping)
    if mapping.ndim != 2 or mapping.shape[0] != 3:
        raise ValueError(f"slot_mapping: takes (tokens,) or (3, slices); got shape {mapping.shape}")
    return _slots_of_slices(int32(mapping), one_integer("num_slices", count), arguments["key"].shape[0])


def _slots_of_slices(slices: jax.Array, count: jax.Array | None, tokens: Any) -> jax.Array:
    first_slot, first_token, length = slices[:, :, None]
    # A difference of two int32 that are not negative is one too; a sum may not be.
    place = jnp.arange(tokens, dtype=jnp.int32) - first_token
    is_in = (first_slot >= 0) & (first_token >= 0) & (place >= 0) & (place < length)
    if count is not None:
        is_in &= jnp.arange(slices.shape[1])[:, None] < count
    return jnp.max(jnp.where(is_in, first_slot + place, -1), axis=0, initial=-1)


# -- values ------------------------------------------------------------------------------------------------------------


def validate(arguments: Mapping[str, Any]) -> None:
    """Raise for slots that are not in the pages or repeated, slices beyond the tokens, and scales of 0."""
    arrays: Arguments = {name: value if value is None else np.asarray(value) for name, value in arguments.items()}
    if arrays["slot_mapping"].ndim == 2:
        _check_slices(arrays)
    _check_slots(arrays)
    check_scales(arrays, "k_scale", "v_scale")


def _check_slices(arrays: Mapping[str, Any]) -> None:
    slices, tokens, count = arrays["slot_mapping"].astype(np.int64), arrays["key"].shape[0], arrays["num_slices"]
    if count is not None and not 0 <= count.item() <= slices.shape[1]:
        raise ValueError(f"num_slices: must be from 0 to {slices.shape[1]}; got {count.item()}")
    slices = slices[:, : None if count is None else count.item()]
    _, first_token, length = slices
    for place in np.flatnonzero((first_token < 0) | (length < 0) | (first_token + length > tokens)):
        raise ValueError(f"slot_mapping: slice {place} is {slices[:, place]}, and there are {tokens} tokens")
    change = np.zeros(tokens + 1, np.int64)
    np.add.at(change, first_token, 1)
    np.add.at(change, first_token + length, -1)
    for token in np.flatnonzero(np.cumsum(change) > 1):
        raise ValueError(f"slot_mapping: token {token} is in two slices")


def _check_slots(arrays: Mapping[str, Any]) -> None:
    pages, first_page = pages_of(arrays)[0], arrays["first_page"]
    count = pages.shape[0] * pages.shape[1]
    mapping = arrays["slot_mapping"]
    # Python's integers, which no sum is beyond. Those of slices are as kernels get them.
    given = (mapping if mapping.ndim == 1 else np.asarray(slots(arrays))).astype(object)
    placed = np.where(given < 0, -1, given + (0 if first_page is None else first_page.item() * pages.shape[1]))
    for token in np.flatnonzero((placed >= count) | ((placed < 0) & (given >= 0))):
        raise ValueError(f"slot_mapping: token {token} goes to slot {placed[token]}; the pages have {count}")
    used, uses = np.unique(placed[placed >= 0].astype(np.int64), return_counts=True)
    for place in np.flatnonzero(uses > 1):
        raise ValueError(f"slot_mapping: {uses[place]} tokens go to slot {used[place]}")
