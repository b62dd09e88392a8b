"""What tuning chooses for attention on a GPU, for each pass, against each kernel that it chooses from.

Contenders with the same kernels and configurations are one program, and measured once.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from ejkernel_core import Example, Key, NoKernel, policy_override, registry
from ejkernel_ops.flash_attention.sizes import COMMON, VARIED

from ._calls import PASSES, Inputs, Run, by_core, draw, jitted
from ._figures import figures_of
from ._report import Bar, Report
from ._rows import Rows
from .tuning import temporary_store

BACKENDS = ("triton", "gluon_sm90", "xla")
ROUNDS = 7
BUDGET_S = 60.0
#: The most time that a choice may take, relative to the best backend.
LIMIT = 1.03


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """On a GPU, against the usual backends or this one."""
    if jax.default_backend() != "gpu":
        return Report("choice", (), text="choice: there is no GPU here, and nothing was measured")
    return compare([*COMMON, *VARIED], (backend,) if backend else BACKENDS, rounds)


def compare(examples: Sequence[Example], backends: Sequence[str], rounds: int) -> Report:
    """One row for each example and pass: the time of the choice, and that of each backend, tuned alone."""
    columns = ("", "chosen", *backends, "chosen / best", "by")
    rows = Rows(f"milliseconds, medians of {rounds} rounds in turn", columns, series=("chosen", *backends))
    bars: list[Bar] = []
    with policy_override(autotune=True, budget_s=BUDGET_S):
        for example in examples:
            inputs = draw(example)
            contenders: dict[str, str | None] = {"chosen": None, **{backend: backend for backend in backends}}
            passes_by_contender = {name: _tune(example, backend, inputs) for name, backend in contenders.items()}
            for pass_name in PASSES:
                programs = {
                    name: passes[pass_name][0] for name, passes in passes_by_contender.items() if pass_name in passes
                }
                if len(programs) < 2:
                    continue  # there is nothing to compare
                runs = dict(passes[pass_name] for passes in passes_by_contender.values() if pass_name in passes)
                figures = figures_of(runs, rounds)
                seconds = {name: figures.times[program].median for name, program in programs.items()}
                ratio = seconds["chosen"] / min(seconds[backend] for backend in backends if backend in seconds)
                medians = [1e3 * seconds[name] if name in seconds else "-" for name in contenders]
                rows.add(f"{example.name}, {pass_name}", *medians, ratio, programs["chosen"])
                bars.append(Bar(f"{example.name}, {pass_name}: chosen / best", ratio, LIMIT, "times"))
    return Report("choice", [rows.table()], bars)


def _tune(example: Example, backend: str | None, inputs: Inputs) -> dict[str, tuple[str, Run]]:
    """By pass, unless it is refused: the kernels with their configurations, and the run. Each backend is tuned."""
    passes: dict[str, tuple[str, Run]] = {}
    with temporary_store():
        for pass_name in PASSES:
            run = jitted(by_core(example, backend), pass_name, inputs)
            try:
                jax.block_until_ready(run())  # the first run tunes
            except NoKernel:
                continue
            # The memory has the records of these calls alone.
            best = {key.op: records[0] for key, records in registry.memory.items() if isinstance(key, Key)}
            program = " and ".join(f"{op}.{record.backend} {record.cfg}" for op, record in best.items())
            passes[pass_name] = program, run
    return passes
