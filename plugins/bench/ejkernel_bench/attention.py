"""Attention by the core against ``jax.nn.dot_product_attention(implementation="xla")``."""

from __future__ import annotations

from typing import Any

import jax

from ._contenders import PASSES, compiled, disagreement, timed
from ._errors import TOLERANCE
from ._problem import Attention, Problem, chosen, through_core
from ._report import Bar, Report, Table
from ._timing import COLUMNS

PROBLEMS = (Problem(1, 4096, 8, 64, causal=True), Problem(1, 4096, 8, 64, causal=False))
ROUNDS = 7


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """Causal and full."""
    tables, bars, wrong = [], [], []
    for problem in PROBLEMS:
        table, own_bars, own_faults = compare(problem, backend, rounds)
        tables.append(table)
        bars += own_bars
        wrong += own_faults
    return Report("attention", tables, bars, wrong)


def compare(problem: Problem, backend: str | None, rounds: int) -> tuple[Table, list[Bar], list[str]]:
    """Forward, and forward+backward: the results against each other, then the times."""
    arrays = problem.arrays()
    ours, peer = through_core(problem, backend), by_jax_nn(problem)
    rows, bars, wrong = [], [], []
    for name in PASSES:
        runs = {"ejkernel": compiled(ours, name, arrays), "jax.nn": compiled(peer, name, arrays)}
        given, right = (call() for call in runs.values())
        wrong += disagreement(f"{name}, {problem}", given, right, TOLERANCE[problem.dtype])
        times = timed(runs, rounds)
        rows += [(f"{name}, {who}", *taken.scaled(1e-3)) for who, taken in times.items()]
        ratio = times["ejkernel"].median / times["jax.nn"].median
        bars.append(Bar(f"{name}, {problem}: ejkernel / jax.nn", ratio, 1.0, "times"))
    title = f"{problem}, {chosen(problem, backend)} against jax.nn: milliseconds, {rounds} rounds in turn"
    return Table(title, ("", *COLUMNS), rows), bars, wrong


def by_jax_nn(problem: Problem) -> Attention:
    """The peer."""

    def attention(query: Any, key: Any, value: Any) -> Any:
        return jax.nn.dot_product_attention(query, key, value, is_causal=problem.causal, implementation="xla")

    return attention
