"""Attention with a window of 256 against attention without one, S 16384."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from ejkernel_core import Example
from ejkernel_ops.flash_attention.sizes import self_attention

from ._attention import sizes
from ._calls import PASSES, Inputs, Results, by_core, draw, jitted, kernels_of, mismatches, tolerance_of, with_gradients
from ._report import Bar, Report, Table
from ._rows import Rows
from ._timing import COLUMNS, interleaved

SIZE = (1, 16384, 8, 64)
WINDOW = 256
ROUNDS = 3
MINIMUM = 8.0
#: The number of queries, from the end, whose results are checked.
CHECKED = 128


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """At a length where a window has to be much faster."""
    table, bars, faults = compare(SIZE, WINDOW, backend, rounds)
    return Report("window", [table], bars, faults)


def compare(
    size: tuple[int, int, int, int], window: int, backend: str | None, rounds: int
) -> tuple[Table, list[Bar], list[str]]:
    """Forward, and forward+backward, each checked and timed with the window and without."""
    full = self_attention(*size)
    examples = {f"window {window}": self_attention(*size, window=window), "none": full}
    inputs = draw(full)
    title = f"{full.name}, {kernels_of(full, backend)}: milliseconds, {rounds} rounds in turn"
    rows = Rows(title, ("", *COLUMNS), series=("median",))
    bars: list[Bar] = []
    faults: list[str] = []
    for pass_name in PASSES:
        runs = {name: jitted(by_core(example, backend), pass_name, inputs) for name, example in examples.items()}
        for name, example in examples.items():
            faults += _mismatches_at_the_end(f"{pass_name}, {example.name}", example, runs[name](), inputs)
        times = interleaved(runs, rounds, warm_up=0)
        for name, contender_times in times.items():
            rows.add(f"{pass_name}, {name}", *contender_times.scaled(1e-3))
        gain = times["none"].median / times[f"window {window}"].median
        bars.append(Bar(f"{pass_name}, {full.name}: none / window {window}", gain, MINIMUM, "times", at_least=True))
    return rows.table(), bars, faults


def _mismatches_at_the_end(label: str, example: Example, results: Results, inputs: Inputs) -> Iterator[str]:
    """Output and gradient of the last queries, which have the most visible keys, against the reference. It would not
    fit with all queries.
    """
    _, length, *_ = sizes(example)
    left, _ = example.arguments(0).get("sliding_window", (length, 0))
    queries = min(CHECKED, length)
    keys = min(queries + left, length)
    arrays = {name: array[:, -(queries if name == "query" else keys) :] for name, array in inputs.arrays.items()}
    reference = jax.jit(with_gradients(by_core(example, "reference"), inputs.wrt))
    expected = reference({}, [arrays[name] for name in inputs.wrt], [inputs.cotangents[0][:, -queries:]])
    last_results = [result[:, -queries:] for result in results[:2]]
    label = f"the last {queries} queries of {label}"
    return mismatches(label, last_results, expected, inputs.names(PASSES[1]), tolerance_of(example))
