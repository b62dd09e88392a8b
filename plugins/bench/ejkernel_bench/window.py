"""What a sliding window saves: causal attention with one against causal attention without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import jax

from ._contenders import PASSES, compiled, disagreement, timed
from ._errors import TOLERANCE
from ._problem import Problem, chosen, through_core, with_gradients
from ._report import Bar, Report, Table
from ._timing import COLUMNS

PROBLEM = Problem(1, 16384, 8, 64)
WINDOW = 256
ROUNDS = 3
BAR = 8.0
#: How many queries, from the end, are checked.
CHECKED = 128


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """At a length where it has to pay."""
    table, bars, wrong = compare(PROBLEM, WINDOW, backend, rounds)
    return Report("window", [table], bars, wrong)


def compare(problem: Problem, window: int, backend: str | None, rounds: int) -> tuple[Table, list[Bar], list[str]]:
    """Forward, and forward+backward, each checked and timed with the window and without."""
    arrays = problem.arrays()
    problems = {f"window {window}": attrs.evolve(problem, window=window), "none": problem}
    rows, bars, wrong = [], [], []
    for name in PASSES:
        runs = {who: compiled(through_core(p, backend), name, arrays) for who, p in problems.items()}
        for who, p in problems.items():
            wrong += _wrong_end(f"{name}, {p}", p, runs[who](), arrays)
        times = timed(runs, rounds)
        rows += [(f"{name}, {who}", *taken.scaled(1e-3)) for who, taken in times.items()]
        gain = times["none"].median / times[f"window {window}"].median
        bars.append(Bar(f"{name}, {problem}: none / window {window}", gain, BAR, "times", at_least=True))
    title = f"{problem}, {chosen(problem, backend)}: milliseconds, {rounds} rounds in turn"
    return Table(title, ("", *COLUMNS), rows), bars, wrong


def _wrong_end(where: str, problem: Problem, given: tuple[Any, ...], arrays: tuple[Any, ...]) -> Iterator[str]:
    """Out and d_query of the last queries, by the reference: all of them would not fit, and these see the farthest."""
    some = min(CHECKED, problem.length)
    seen = problem.length if problem.window is None else min(some + problem.window, problem.length)
    query, key, value, d_out = arrays
    reference = jax.jit(with_gradients(through_core(problem, "reference")))
    right = reference(query[:, -some:], key[:, -seen:], value[:, -seen:], d_out[:, -some:])
    ends = tuple(array[:, -some:] for array in given[:2])
    return disagreement(f"the last {some} queries of {where}", ends, right[:2], TOLERANCE[problem.dtype])
