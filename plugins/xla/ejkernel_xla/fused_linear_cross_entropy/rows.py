"""The configuration of the kernels that take rows in chunks, and their hooks for it."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from ejkernel_core import Invocation, hookimpl
from ejkernel_ops.fused_linear_cross_entropy import chunks
from ejkernel_ops.symbolic import refuse_symbolic


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
