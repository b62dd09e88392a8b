"""How a kernel walks over the blocks that its table names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas_tpu._sight import Sight


def visit(sight: Sight, table: Any, row: Any, block: Any, step: Any, work: Callable[[Any, bool], None]) -> None:
    """Do ``work(other block, masked)`` if this step has a block: whole tiles are told not to look at masks."""
    base = sight.base(row, block)
    other = table[base] + step
    here = step < table[base + 1]
    if sight.masked != "sometimes":
        pl.when(here)(lambda: work(other, sight.masked == "always"))
        return
    whole = jnp.logical_and(other >= table[base + 2], other < table[base + 3])
    pl.when(jnp.logical_and(here, whole))(lambda: work(other, False))
    pl.when(jnp.logical_and(here, jnp.logical_not(whole)))(lambda: work(other, True))
