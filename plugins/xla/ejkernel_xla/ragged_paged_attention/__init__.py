"""``ragged_paged_attention`` on any device JAX runs on: tiles of queries, each with one block of keys after another.

Only the blocks that a tile sees are read, and of a cache never more than a block for each tile at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import jax
from attrs.validators import ge, instance_of, not_

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.ragged_paged_attention import definition

from . import _attend, _tiling

VERSION = 1
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}


_COUNT: Any = [instance_of(int), not_(instance_of(bool)), ge(1)]


@attrs.frozen
class Config:
    """The sizes of tiles of queries and of blocks of keys, and how many tiles are computed at a time."""

    #: The tokens of a tile.
    q_tile: int = attrs.field(default=16, validator=_COUNT)
    #: The keys of a block.
    kv_block: int = attrs.field(default=128, validator=_COUNT)
    #: The tiles that are computed together. Each of them goes through as many blocks as the longest.
    together: int = attrs.field(default=8, validator=_COUNT)


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """Tiles of about the tokens of a sequence, and so many at a time that their blocks are of moderate size."""
    return Config(*_tiling.sizes(inv))


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """Smaller and larger ones; with ``split_size`` only those that do not depend on the batch."""
    return [Config(*sizes) for sizes in _tiling.space(inv)]


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, jax.Array]:
    """The output and the lse."""
    q_tile, kv_block = min(cfg.q_tile, inv["query"].shape[0]), min(cfg.kv_block, definition.most_keys(inv))
    return _attend.attention(inv, max(q_tile, 1), max(kv_block, 1), cfg.together)
