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


def scalars(a: Arguments) -> jax.Array:
    """The seed of the dropout as 32 bits, or 0 without dropout."""
    seed = jnp.uint32(0) if a["dropout_seed"] is None else a["dropout_seed"]
    return jax.lax.bitcast_convert_type(seed, jnp.int32).reshape(1)


def read_entry(p: Problem, numbers: Any, b: Any) -> Entry:
    """The scalars of the batch entry ``b``, from a reference to `scalars`."""
    return Entry(numbers[0])
