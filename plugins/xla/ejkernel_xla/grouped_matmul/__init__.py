"""``grouped_matmul`` on any device JAX runs on: tiles of rows of one group, in plain JAX."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import jax
from attrs.validators import ge, instance_of, le, not_

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.symbolic import refuse_symbolic

from . import tiles

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}


@attrs.frozen
class Config:
    """The number of rows that are multiplied at a time."""

    rows: int = attrs.field(
        default=256, validator=[instance_of(int), not_(instance_of(bool)), ge(1), le(tiles.LARGEST)]
    )


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """Tiles of about a group."""
    refuse_symbolic(inv)
    return Config(tiles.rows_of_a_group(inv["lhs"].shape[0], inv["group_sizes"].shape[0]))


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """The heuristic's rows, and twice and half as many."""
    return [Config(rows) for rows in tiles.neighbours(heuristic_cfg(inv).rows)]


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise for symbolic sizes; with others, any number of rows that a Config takes is right."""
    refuse_symbolic(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> jax.Array:
    """The result."""
    return tiles.forward(inv, cfg.rows)
