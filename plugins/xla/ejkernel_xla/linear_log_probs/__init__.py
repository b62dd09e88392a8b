"""``linear_log_probs`` on any device JAX runs on: the logits of one chunk of rows after another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import jax

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.fused_linear_cross_entropy.definition import logits_of, statistics_of
from ejkernel_ops.linear_log_probs import definition
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
def run_backend(inv: Invocation, cfg: Config) -> tuple[jax.Array, ...]:
    """The log-probability of each label, and the entropy of each row."""

    def step(carry: None, arrays: dict[str, Any]) -> tuple[None, dict[str, Any]]:
        labels = chunks.labels_of(arrays)
        logits = definition.divided(logits_of(arrays["hidden"], inv), inv)
        statistics = statistics_of(logits)
        rows = {"log_probs": definition.log_probs(logits, statistics, labels)}
        if inv.needs("entropy"):
            rows["entropy"] = definition.entropies(logits, statistics, labels)
        return None, rows

    _, rows = chunks.over_chunks(step, None, chunks.rows_of(inv), cfg.rows)
    return tuple(
        rows[name].reshape(inv["labels"].shape) if name in rows else None  # type: ignore[misc]
        for name in ("log_probs", "entropy")
    )
