"""What tuning chooses, pass by pass, against each of the kernels that it chooses from.

Two contenders that come to the same kernels with the same configurations are one program, and measured once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax

from ejkernel_core import NoKernel, policy_override, registry

from ._contenders import PASSES, Results, compiled
from ._problem import Problem, through_core
from ._report import Bar, Report, Table
from ._timing import in_bursts
from .flash_attention import ANCHORS, MORE, SECONDS
from .tuning import nothing_remembered

BACKENDS = ("triton", "gluon_sm90", "xla")
ROUNDS = 7
BUDGET_S = 60.0
#: How much slower than the best of them a choice may be.
BAR = 1.03


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """On a GPU; ``backend`` stands for those that are compared there."""
    if jax.default_backend() != "gpu":
        return Report("choice", (), text="choice: there is no GPU here, and nothing was measured")
    return compare([*ANCHORS, *MORE], (backend,) if backend else BACKENDS, rounds)


def compare(problems: Sequence[Problem], backends: Sequence[str], rounds: int) -> Report:
    """One row a problem and pass: the choice's time, and that of each backend that takes it, tuned alone."""
    rows, bars = [], []
    with policy_override(autotune=True, budget_s=BUDGET_S):
        for problem in problems:
            arrays, extras = problem.arrays(), problem.extras()
            who: dict[str, str | None] = {"chosen": None, **{backend: backend for backend in backends}}
            tuned = {label: _tuned(problem, backend, arrays, extras) for label, backend in who.items()}
            for name in PASSES:
                programs = {label: passes[name][0] for label, passes in tuned.items() if name in passes}
                if len(programs) < 2:
                    continue  # there is nothing to compare
                runs = dict(passes[name] for passes in tuned.values() if name in passes)
                times = in_bursts(runs, rounds, SECONDS)
                seconds = {label: times[program].median for label, program in programs.items()}
                ratio = seconds["chosen"] / min(seconds[backend] for backend in backends if backend in seconds)
                medians = [1e3 * seconds[label] if label in seconds else "-" for label in who]
                rows.append((f"{problem}, {name}", *medians, ratio, programs["chosen"]))
                bars.append(Bar(f"{problem}, {name}: chosen / best", ratio, BAR, "times"))
    columns = ("", *who, "chosen / best", "chosen")
    return Report("choice", [Table(f"milliseconds, medians of {rounds} rounds in turn", columns, rows)], bars)


def _tuned(
    problem: Problem, backend: str | None, arrays: tuple[jax.Array, ...], extras: Mapping[str, jax.Array]
) -> dict[str, tuple[str, Callable[[], Results]]]:
    """For each pass that is not refused which kernels run, and one run of them: tuned alone, whatever others found."""
    found = {}
    with nothing_remembered():
        for name in PASSES:
            run = compiled(through_core(problem, backend), name, arrays, extras)
            try:
                jax.block_until_ready(run())  # it is tuned here
            except NoKernel:
                continue
            # All that is remembered are its own calls.
            best = {key.op: records[0] for key, records in registry.memory.items()}
            found[name] = " and ".join(f"{op}.{record.backend} {record.cfg}" for op, record in best.items()), run
    return found
