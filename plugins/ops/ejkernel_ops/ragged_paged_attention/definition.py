"""The definition in plain JAX, whose parts kernels share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_ops.flash_attention.tokens import band
from ejkernel_ops.pages import pages_of

Call = Mapping[str, Any]


def output_dtype(inv: Call) -> Any:
    """That of queries; of those of 8 bits bfloat16."""
    dtype = inv["query"].dtype
    return dtype if dtype.itemsize > 1 else jnp.dtype(jnp.bfloat16)


def result_dtype(inv: Call) -> Any:
    """That of logits, sums and statistics."""
    return jnp.promote_types(output_dtype(inv), jnp.float32)


def page_size(inv: Call) -> int:
    return int(pages_of(inv)[0].shape[1])


def kv_heads(inv: Call) -> int:
    pages = pages_of(inv)[0]
    return int(pages.shape[2] if inv["kv_pages"] is None else pages.shape[2] // 2)


def value_dim(inv: Call) -> int:
    return int(pages_of(inv)[-1].shape[3])


def most_keys(inv: Call) -> int:
    """That a table has pages for."""
    return int(inv["block_tables"].shape[1]) * page_size(inv)


def lengths(inv: Call) -> jax.Array:
    """The keys of each sequence: 0 for those behind ``num_seqs``."""
    kv_lens, count = inv["kv_lens"], inv["num_seqs"]
    kv_lens = jnp.clip(kv_lens, 0, most_keys(inv))
    return kv_lens if count is None else jnp.where(jnp.arange(kv_lens.shape[0]) < count, kv_lens, 0)


def place_of_token(inv: Call, token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sequence of each token, its position, and whether there is such a sequence."""
    starts, ends, count = inv["query_start_loc"][:-1], inv["query_start_loc"][1:], inv["num_seqs"]
    is_own = (starts <= token[..., None]) & (token[..., None] < ends)
    if count is not None:
        is_own &= jnp.arange(starts.shape[0]) < count
    sequence = jnp.argmax(is_own, axis=-1)
    return sequence, lengths(inv)[sequence] - (ends[sequence] - token), is_own.any(-1)


def is_visible(inv: Call, position: jax.Array, slot: jax.Array, length: jax.Array) -> jax.Array:
    """Whether a query at this position sees the key of a slot, of ``length`` that there are."""
    left, right = band(inv["causal"], inv["sliding_window"])
    visible = slot < length
    if left is not None:
        visible &= slot >= position - left
    if right is not None:
        visible &= slot <= position + right
    return visible


def keys_and_values(inv: Call, tables: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The keys and the values in these slots of sequences, whose tables are (..., pages): (..., slots, kv heads, dim),
    as numbers of `result_dtype`. Those of a slot whose entry is not a page are of any page.
    """
    first_page, size = inv["first_page"], page_size(inv)
    entries = jnp.take(tables, slots // size, axis=-1, mode="clip")
    page = jnp.maximum(entries, 0) if first_page is None else jnp.where(entries < 0, 0, entries + first_page)
    found = [pages.at[page, slots % size].get(mode="clip") for pages in pages_of(inv)]
    key, value = found if len(found) == 2 else (found[0][..., ::2, :], found[0][..., 1::2, :])
    return _numbers(inv, key, inv["k_scale"]), _numbers(inv, value, inv["v_scale"])


def queries(inv: Call) -> jax.Array:
    """(tokens, heads, dim), as numbers of `result_dtype`."""
    return _numbers(inv, inv["query"], inv["q_scale"])


def _numbers(inv: Call, array: jax.Array, scale: jax.Array | None) -> jax.Array:
    array = array.astype(result_dtype(inv))
    return array if scale is None else array * scale.astype(array.dtype)[:, None]


def capped(inv: Call, logits: jax.Array) -> jax.Array:
    """The logits of scaled products."""
    cap = inv["logits_soft_cap"]
    return logits if cap is None else cap * jnp.tanh(logits / cap)
