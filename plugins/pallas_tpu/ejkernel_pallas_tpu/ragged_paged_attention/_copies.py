"""The copies of a block of slots, page by page, from main memory into one of two buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ._plan import Tile
from ._sizes import Sizes

Copies = Callable[[Tile, Any, Any], None]


def copies(s: Sizes, table_width: int, table: Any, refs: Any) -> tuple[Copies, Copies]:
    """``start(tile, block, buffer)`` and ``wait``, of the pages of a block that a query of the tile sees.

    The table is that of all sequences, one behind the other.
    """
    pools = [name for name in ("kv", "key", "value") if hasattr(refs, f"{name}_pages")]

    def each(act: Callable[[Any], None], tile: Tile, block: Any, buffer: Any) -> None:
        # A page longer than a block is copied in parts.
        parts = s.page_size // s.part
        entry = block * s.pages // parts
        first = jnp.maximum(tile.first_slot // s.page_size - entry, 0) if s.pages > 1 else 0
        end = jnp.minimum(-(-tile.end_slot // s.page_size) - entry, s.pages) if s.pages > 1 else 1

        def copy(number: Any, carry: None) -> None:
            page = table[tile.sequence * table_width + entry + number]
            for name in pools:
                source = getattr(refs, f"{name}_pages").at[page]
                if parts > 1:
                    source = source.at[pl.ds(pl.multiple_of(block % parts * s.part, s.part), s.part)]
                target = getattr(refs, f"{name}_blocks").at[buffer, number]
                act(pltpu.make_async_copy(source, target, refs.arrived.at[buffer]))

        jax.lax.fori_loop(first, end, copy, None)

    def start(tile: Tile, block: Any, buffer: Any) -> None:
        each(lambda copy: copy.start(), tile, block, buffer)

    def wait(tile: Tile, block: Any, buffer: Any) -> None:
        each(lambda copy: copy.wait(), tile, block, buffer)

    return start, wait
