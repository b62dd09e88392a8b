"""``ragged_paged_attention`` on any device JAX runs on: tiles of queries, each with one block of keys after another.

Only the blocks that a tile sees are read, and of a cache never more than a block for each tile at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import jax
from attrs.validators import ge

from ejkernel_core import Invocation, hookimpl

from . import _attend, _tiling

VERSION = 1
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}


@attrs.frozen
class Config:
    """The sizes of tiles of queries and of blocks of keys, and how many tiles are computed at a time."""

    #: The tokens of a tile.
    q_tile: int = attrs.field(default=16, validator=ge(1))
    #: The keys of a block.
    kv_block: int = attrs.field(default=128, validator=ge(1))
    #: The tiles that are computed together. Each of them goes through as many blocks as the longest.
    together: int = attrs.field(default=8, validator=ge(1))


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
    return _attend.attention(inv, cfg.q_tile, cfg.kv_block, cfg.together)
