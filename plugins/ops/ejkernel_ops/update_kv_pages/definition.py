"""The definition in plain JAX, whose parts kernels share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def stored_tokens(inv: Mapping[str, Any], dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The keys and the values, in the dtype of the pages."""
    return stored(inv["key"], inv["k_scale"], dtype), stored(inv["value"], inv["v_scale"], dtype)


def stored(array: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
    """An array (tokens, heads, head_dim) in the dtype of pages.

    In 8 bits it is the quotient by the scale, rounded to the nearest number, from the lowest to the largest one. NaN
    stays NaN, and is 0 in integers.
    """
    if dtype.itemsize > 1:
        return array.astype(dtype)
    quotient = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    if scale is not None:
        quotient = quotient / scale.astype(quotient.dtype)[:, None]
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        rounded = jnp.where(jnp.isnan(quotient), 0, jnp.round(quotient))
        return jnp.clip(rounded, int(limits.min), int(limits.max)).astype(dtype)
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(quotient, -largest, largest).astype(dtype)


def interleaved(key: jax.Array, value: jax.Array) -> jax.Array:
    """(tokens, 2 * heads, head_dim): the key of each head, and its value next to it."""
    tokens, heads, dim = key.shape
    return jnp.stack([key, value], axis=2).reshape(tokens, 2 * heads, dim)


def joined(inv: Mapping[str, Any]) -> jax.Array:
    """The updated pages of keys and values."""
    pages = inv["kv_pages"]
    return written(inv, pages, interleaved(*stored_tokens(inv, pages.dtype)))


def pair(inv: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    """The updated pages of keys, and those of values."""
    key_pages, value_pages = inv["key_pages"], inv["value_pages"]
    key, value = stored_tokens(inv, key_pages.dtype)
    return written(inv, key_pages, key), written(inv, value_pages, value)


def written(inv: Mapping[str, Any], pages: jax.Array, rows: jax.Array) -> jax.Array:
    """The pages, with the row of each token at its slot. A token without a slot in the pages is not stored."""
    flat = pages.reshape(pages.shape[0] * pages.shape[1], *pages.shape[2:])
    return flat.at[places(inv, pages)].set(rows, mode="drop").reshape(pages.shape)


def places(inv: Mapping[str, Any], pages: jax.Array) -> jax.Array:
    """Where each token goes, counted in tokens from the first page of all; behind the last one if it is not stored."""
    (pages_count, size), slots, first_page = pages.shape[:2], inv["slot_mapping"], inv["first_page"]
    count = pages_count * size
    if first_page is None:
        return jnp.where((slots >= 0) & (slots < count), slots, count)
    # In pages, because the place of a token may be more than an int32 holds, and come round to another page. Here it
    # comes round to numbers below 0 alone.
    page = slots // size + jnp.minimum(first_page, pages_count)
    is_stored = (slots >= 0) & (page >= 0) & (page < pages_count)
    return jnp.where(is_stored, slots + first_page * size, count)
