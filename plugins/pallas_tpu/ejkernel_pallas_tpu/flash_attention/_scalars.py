"""What a kernel has in scalar memory beside its table of steps."""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_pallas_tpu.flash_attention._problem import Arguments, Problem


@attrs.frozen(eq=False)
class Entry:
    """The scalars of one batch entry."""

    #: The seed of the dropout.
    seed: Any
    #: The position of the first query. Slot j of the keys is at position j, unless each slot has a position of its own.
    q_start: Any
    #: How many slots, from the first, hold a key.
    length: Any


def scalars(a: Arguments) -> jax.Array:
    """The seed of the dropout as 32 bits, or 0 without dropout; then of all batch entries the position of the first
    query, and the length, where the call has them.
    """
    seed = jnp.uint32(0) if a["dropout_seed"] is None else a["dropout_seed"]
    numbers = [jax.lax.bitcast_convert_type(seed, jnp.int32).reshape(1)]
    if a["q_start"] is not None:
        numbers.append(a["q_start"])
    if a["kv_lengths"] is not None:
        # A longer length is an error that cannot be detected here, but padding is not a key.
        numbers.append(jnp.minimum(a["kv_lengths"], jnp.int32(a["key"].shape[1])))
    return numbers[0] if len(numbers) == 1 else jnp.concatenate(numbers)


def read_entry(p: Problem, numbers: Any, b: Any) -> Entry:
    """The scalars of the batch entry ``b``, from a reference to `scalars`. What a call lacks is static."""
    return Entry(
        numbers[0],
        numbers[1 + b] if p.positions else p.k_length - p.q_length,
        numbers[1 + p.batch + b] if p.empty == "lengths" else p.k_length,
    )
