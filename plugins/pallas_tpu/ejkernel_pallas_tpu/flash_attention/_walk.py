"""What a kernel does in a step, by its word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel_pallas_tpu.flash_attention._sight import SEEN, WHOLE, Sight, is_set, passing


def visit(sight: Sight, word: Any, work: Callable[[Any, bool], None]) -> None:
    """Do ``work(other block, masked)`` if this step has one: whole tiles are told not to look at masks."""
    other, seen = passing(word), is_set(word, SEEN)
    if sight.masked != "sometimes":
        pl.when(seen)(lambda: work(other, sight.masked == "always"))
        return
    whole = is_set(word, WHOLE)
    pl.when(jnp.logical_and(seen, whole))(lambda: work(other, False))
    pl.when(jnp.logical_and(seen, jnp.logical_not(whole)))(lambda: work(other, True))
