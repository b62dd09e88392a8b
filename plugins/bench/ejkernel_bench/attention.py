"""Attention against jax.nn.dot_product_attention, S 4096, causal and full."""

from __future__ import annotations

from ejkernel_core import Example
from ejkernel_ops.flash_attention.sizes import self_attention

from ._attention import by_jax_nn
from ._calls import PASSES, by_core, describe, draw, jitted, kernels_of, mismatches, tolerance_of
from ._report import Bar, Report, Table
from ._rows import Rows
from ._timing import COLUMNS, interleaved

EXAMPLES = tuple(self_attention(1, 4096, 8, 64, causal=causal) for causal in (True, False))
ROUNDS = 7


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """Against ``implementation="xla"``."""
    tables, bars, faults = [], [], []
    for example in EXAMPLES:
        table, new_bars, new_faults = compare(example, backend, rounds)
        tables.append(table)
        bars += new_bars
        faults += new_faults
    return Report("attention", tables, bars, faults)


def compare(example: Example, backend: str | None, rounds: int) -> tuple[Table, list[Bar], list[str]]:
    """Forward, and forward+backward: the results against each other, then the times."""
    inputs = draw(example)
    ours, peer = by_core(example, backend), by_jax_nn(describe(example))
    assert peer is not None  # it takes every plain call
    title = f"{example.name}, {kernels_of(example, backend)} against jax.nn: milliseconds, {rounds} rounds in turn"
    rows = Rows(title, ("", *COLUMNS), series=("median",))
    bars: list[Bar] = []
    faults: list[str] = []
    for pass_name in PASSES:
        runs = {"ejkernel": jitted(ours, pass_name, inputs), "jax.nn": jitted(peer, pass_name, inputs)}
        results, expected = (run() for run in runs.values())
        label = f"{pass_name}, {example.name}"
        faults += mismatches(label, results, expected, inputs.names(pass_name), tolerance_of(example))
        times = interleaved(runs, rounds, warm_up=0)
        for name, contender_times in times.items():
            rows.add(f"{pass_name}, {name}", *contender_times.scaled(1e-3))
        ratio = times["ejkernel"].median / times["jax.nn"].median
        bars.append(Bar(f"{label}: ejkernel / jax.nn", ratio, 1.0, "times"))
    return rows.table(), bars, faults
