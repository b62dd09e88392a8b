"""``linear_argmax`` on any device JAX runs on: the logits of one chunk of rows after another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.fused_linear_cross_entropy.definition import logits_of
from ejkernel_ops.symbolic import refuse_symbolic
from ejkernel_xla.fused_linear_cross_entropy import chunks

#: The version of the kernel and its Config. Calls with a record of another version are measured again.
VERSION = 1
#: Where it runs, and how strongly it is preferred there.
PLATFORMS = {"cpu": 10, "gpu": 10, "tpu": 10}


@attrs.frozen
class Config(chunks.Rows):
    """The most rows of a chunk."""


@hookimpl
def heuristic_cfg(inv: Invocation) -> Config:
    """As many rows as the memory for logits allows."""
    refuse_symbolic(inv)
    return Config(chunks.rows_of_memory(inv))


@hookimpl
def config_space(inv: Invocation) -> Iterable[Config]:
    """The heuristic's rows, and half, twice and four times as many."""
    return [Config(rows) for rows in chunks.neighbours(inv)]


@hookimpl
def check_cfg(inv: Invocation, cfg: Config) -> None:
    """Raise for symbolic sizes; with others, any number of rows that a Config takes is right."""
    refuse_symbolic(inv)


@hookimpl
def run_backend(inv: Invocation, cfg: Config) -> jax.Array:
    """The column of the largest logit of each row."""

    def step(carry: None, arrays: dict[str, Any]) -> tuple[None, dict[str, Any]]:
        return None, {"token": jnp.argmax(logits_of(arrays["hidden"], inv), -1).astype(jnp.int32)}

    hidden = inv["hidden"]
    _, rows = chunks.over_chunks(step, None, {"hidden": hidden.reshape(-1, hidden.shape[-1])}, cfg.rows)
    token: jax.Array = rows["token"].reshape(hidden.shape[:-1])
    return token
