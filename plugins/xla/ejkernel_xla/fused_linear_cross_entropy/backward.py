"""``fused_linear_cross_entropy_bwd`` on any device JAX runs on: the logits of each chunk of rows again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.fused_linear_cross_entropy.definition import arithmetic_dtype, labels_of, weights_of
from ejkernel_ops.symbolic import refuse_symbolic

from . import chunks, gradients

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
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array | None, ...]:
    """The gradients of the arrays that ``wrt`` names."""
    wrt, wide = inv["wrt"], arithmetic_dtype(inv["hidden"])
    d_loss = jnp.zeros(inv["labels"].shape, wide) if inv["d_loss"] is None else inv["d_loss"]
    needs = {name: name in wrt and inv.needs(name) for name in ("hidden", "weight", "bias")}
    by_name: dict[str, Any] = {"token_weights": d_loss * inv["row_losses"]}
    if any(needs.values()):
        cotangents = {"d_loss": d_loss.reshape(-1) * weights_of(inv, labels_of(inv))}
        if inv["d_lse"] is not None:
            cotangents["d_lse"] = inv["d_lse"].reshape(-1)
        _, of_product = gradients.with_gradients(inv, cfg.rows, cotangents, needs, inv["hidden"].dtype)
        by_name |= of_product._asdict()
    return tuple(gradients.rounded(inv, name, by_name[name]) if inv.needs(name) else None for name in wrt)
