"""The engine without attention over pages: each layer gathers the pages of all sequences, for ``jax.nn``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .serving import Engine

#: The name of this engine in reports.
GATHER = "gather"
#: The fewest pages that are gathered of a sequence: each power of two from here on compiles two programs.
FEWEST_PAGES = 16


class GatherEngine(Engine):
    """An engine whose tables are cut to a power of two of pages, at least as many as the longest sequence of a step
    has. So a step gathers not many more pages than it has to, by few programs, which are all compiled at first.
    """

    _fewest = 0

    @property
    def widths(self) -> list[int]:
        """Of the tables."""
        powers, width = [], min(FEWEST_PAGES, self.table)
        while width < self.table:
            powers.append(width)
            width *= 2
        return [*powers, self.table]

    def _arrays(self, shares: Any, size: int) -> tuple[Any, ...]:
        tokens, positions, batch, *others = super()._arrays(shares, size)
        pages = -(-int(batch.kv_lens.max()) // self.limits.page_size)
        width = next(width for width in self.widths if width >= max(pages, self._fewest))
        return tokens, positions, batch._replace(block_tables=batch.block_tables[:, :width]), *others

    def _compile(self) -> float:
        seconds = 0.0
        for width in self.widths:
            self._fewest = width
            seconds += super()._compile()
        self._fewest = 0
        return seconds


def gather_attention(
    query: jax.Array,
    cache: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    query_start_loc: jax.Array,
    num_seqs: jax.Array,
    *,
    metadata: Any,
    max_query_len: int | None,
    first_page: Any,
) -> jax.Array:
    """As ``ragged_paged_attention``: one token of each sequence in a batch, and then the prompts, one after another."""
    size = query.shape[0]
    places = jnp.maximum(query_start_loc[1:] - 1, 0)
    key, value = _gathered(cache, block_tables, first_page)
    last = _attention(query[places][:, None], key, value, key_value_seq_lengths=jnp.maximum(kv_lens, 1))[:, 0]
    is_there = jnp.arange(places.shape[0]) < num_seqs[0]
    out = jnp.zeros((2 * size, *query.shape[1:]), query.dtype)
    out = out.at[jnp.where(is_there, places, 2 * size)].set(last, mode="drop")
    if max_query_len == 1:
        return out[:size]
    counts = jnp.diff(query_start_loc)
    padded = jnp.concatenate([query, jnp.zeros_like(query)])  # a slice of all tokens can begin anywhere

    def with_prompt(sequence: Any, out: jax.Array) -> jax.Array:
        start, count, row = query_start_loc[sequence], counts[sequence], jnp.arange(size)
        key, value = _gathered(cache, block_tables[sequence][None], first_page)
        position = kv_lens[sequence] - count + row
        mask = (jnp.arange(key.shape[1]) <= position[:, None])[None, None]
        queries, before = (jax.lax.dynamic_slice_in_dim(array, start, size) for array in (padded, out))
        new = jnp.where((row < count)[:, None, None], _attention(queries[None], key, value, mask=mask)[0], before)
        changed: jax.Array = jax.lax.dynamic_update_slice_in_dim(out, new, start, 0)
        return changed

    is_prompt = is_there & (counts > 1)  # those that decode are before
    first = jnp.where(is_prompt.any(), is_prompt.argmax(), num_seqs[0])
    whole: jax.Array = jax.lax.fori_loop(first, num_seqs[0], with_prompt, out)
    return whole[:size]


def _gathered(cache: jax.Array, tables: jax.Array, first_page: Any) -> tuple[jax.Array, jax.Array]:
    """(sequences, keys, key heads, head dim): the keys and the values of whole tables."""
    pages = cache.at[jnp.maximum(tables, 0) + first_page].get(mode="clip")
    rows = pages.reshape(tables.shape[0], -1, *pages.shape[3:])
    return rows[:, :, ::2], rows[:, :, 1::2]


def _attention(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
    is_on_card = jax.default_backend() == "gpu" and query.dtype.itemsize == 2
    options |= {"implementation": "cudnn" if is_on_card else None}
    out: jax.Array = jax.nn.dot_product_attention(query, key, value, **options)
    return out
