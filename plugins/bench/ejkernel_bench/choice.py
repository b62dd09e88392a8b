"""What tuning chooses, pass by pass, against each of the kernels that it chooses from."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from ejkernel_core import policy_override

from ._contenders import PASSES, compiled
from ._problem import Problem, chosen, through_core
from ._report import Bar, Report, Table
from ._timing import in_bursts
from .flash_attention import ANCHORS, MORE, SECONDS
from .tuning import nothing_remembered

BACKENDS = ("triton", "xla")
ROUNDS = 7
BUDGET_S = 30.0
#: How much slower than the best of them a choice may be.
BAR = 1.03


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """On a GPU; ``backend`` stands for the two that are compared there."""
    if jax.default_backend() != "gpu":
        return Report("choice", (), text="choice: there is no GPU here, and nothing was measured")
    return compare([*ANCHORS, *MORE], (backend,) if backend else BACKENDS, rounds)


def compare(problems: Sequence[Problem], backends: Sequence[str], rounds: int) -> Report:
    """One row a problem and pass: the choice's time, and that of each backend with its own tuned configuration."""
    rows, bars = [], []
    with nothing_remembered(), policy_override(autotune=True, budget_s=BUDGET_S):
        for problem in problems:
            arrays, extras = problem.arrays(), problem.extras()
            who: dict[str, str | None] = {"chosen": None, **{backend: backend for backend in backends}}
            for name in PASSES:
                runs = {
                    label: compiled(through_core(problem, backend), name, arrays, extras)
                    for label, backend in who.items()
                }
                times = in_bursts(runs, rounds, SECONDS)
                best = min(times[backend].median for backend in backends)
                medians = [times[label].scaled(1e-3)[0] for label in who]
                ratio = times["chosen"].median / best
                rows.append((f"{problem}, {name}", *medians, ratio, _names(problem, name)))
                bars.append(Bar(f"{problem}, {name}: chosen / best", ratio, BAR, "times"))
    columns = ("", *who, "chosen / best", "kernel")
    return Report("choice", [Table(f"milliseconds, medians of {rounds} rounds in turn", columns, rows)], bars)


def _names(problem: Problem, name: str) -> str:
    both = chosen(problem, None)
    return both.partition(" and ")[0] if name == "forward" else both
