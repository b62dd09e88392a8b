"""The memory that attention takes, forward and backward, above what goes in and comes out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import attrs
import jax

from ._fresh import in_fresh_process
from ._problem import Problem, chosen, through_core, with_gradients
from ._report import Bar, Report, Table

PROBLEM = Problem(1, 16384, 8, 64)
ROUNDS = 1
BAR_GIB = 1.0
GIB = 2**30

#: A process of its own, because the peak of a process only ever grows.
_PEAK = """
import json, sys
from ejkernel_bench.memory import peak
from ejkernel_bench._problem import Problem
backend, *numbers = json.loads(sys.argv[1])
print(json.dumps(peak(Problem(*numbers), backend)))
"""


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """At a length whose dense scores alone are 8 GiB. The most of so many rounds."""
    table, bars = measure(PROBLEM, backend, rounds)
    return Report("memory", [table], bars)


def measure(problem: Problem, backend: str | None, rounds: int) -> tuple[Table, list[Bar]]:
    """By the compiler's count, and on a CPU by the operating system's."""
    argument = json.dumps([backend, *attrs.astuple(problem)])
    figures = [in_fresh_process(_PEAK, argument) for _ in range(rounds)]
    found = {"temporaries, says the compiler": max(temporary for temporary, _ in figures) / GIB}
    if jax.default_backend() == "cpu":  # elsewhere the arrays are not in the process's memory
        found["growth of the process, says the system"] = max(grown for _, grown in figures) / GIB
    bars = [Bar(f"{name}, {problem}", gib, BAR_GIB, "GiB") for name, gib in found.items()]
    title = f"{problem}, {chosen(problem, backend)}: memory of forward+backward above inputs and outputs"
    return Table(title, ("", "GiB"), found.items()), bars


def peak(problem: Problem, backend: str | None) -> tuple[int, int]:
    """Bytes of the compiled function's temporaries, and by which this process grows at most while it runs.

    The growth counts from what is resident after compiling, so it can only be too large: by what compiling took more.
    """
    arrays = jax.block_until_ready(problem.arrays())
    function = jax.jit(with_gradients(through_core(problem, backend))).lower(*arrays).compile()
    before = _resident()
    outputs = sum(result.nbytes for result in jax.block_until_ready(function(*arrays)))
    temporary = function.memory_analysis().temp_size_in_bytes
    return int(temporary), max(_peak_resident() - before - outputs, 0)


def _resident() -> int:
    """What the process holds; where the system does not tell, the most it has held so far."""
    import resource

    table = Path("/proc/self/statm")
    return int(table.read_text().split()[1]) * resource.getpagesize() if table.exists() else _peak_resident()


def _peak_resident() -> int:
    import resource  # no such module on Windows, where nothing else here needs it either

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
