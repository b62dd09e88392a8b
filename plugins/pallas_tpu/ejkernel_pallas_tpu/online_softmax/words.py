"""Words of 32 bits, by which vector memory is read at a stride."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def has_pairs(dtype: Any, heads: int) -> bool:
    """Whether a word has two heads of a slot."""
    return jnp.dtype(dtype).itemsize == 2 and heads % 2 == 0
