"""The main job: causal attention, forward and backward, on the device at hand; checked, explained and timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

import ejkernel_core

from ._errors import TOLERANCE, error, faults
from ._problem import GRADIENTS, Problem, through_core, with_gradients
from ._report import Report, Table
from ._timing import interleaved, once

#: What the reference, which is dense, can still be asked on the device.
SIZES = {
    "cpu": Problem(1, 1024, 8, 64),
    "gpu": Problem(1, 4096, 16, 128, "bfloat16"),
    "tpu": Problem(1, 4096, 16, 128, "bfloat16"),
}
ROUNDS = 9


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """The size that suits the device."""
    return solve(SIZES.get(jax.default_backend(), SIZES["cpu"]), backend, rounds)


def solve(problem: Problem, backend: str | None, rounds: int) -> Report:
    """Attention through the core against the reference."""
    arrays = problem.arrays()
    explanation = ejkernel_core.explain("flash_attention", *arrays[:3], backend=backend, **problem.options)
    firsts, contenders, results = _first_calls(problem, arrays, backend)
    medians = {name: times.median for name, times in interleaved(contenders, rounds).items()}
    accuracy, wrong = _accuracy(problem, arrays, results)
    tables = [accuracy, _pace(firsts, medians, _flops(explanation))]
    return Report("run", tables, faults=wrong, text=f"flash_attention {problem}\n\n{explanation}")


def _first_calls(
    problem: Problem, arrays: tuple[jax.Array, ...], backend: str | None
) -> tuple[dict[str, float], dict[str, Callable[[], Any]], tuple[Any, ...]]:
    """Seconds of the first calls, compilation included; the calls; and the results of forward and backward."""
    attention = through_core(problem, backend)
    gradients = jax.jit(with_gradients(attention))
    contenders = {"forward": lambda: attention(*arrays[:3]), "forward+backward": lambda: gradients(*arrays)}
    firsts = {name: once(call) for name, call in contenders.items()}
    return {name: seconds for name, (seconds, _) in firsts.items()}, contenders, firsts["forward+backward"][1]


def _accuracy(problem: Problem, arrays: tuple[jax.Array, ...], results: tuple[Any, ...]) -> tuple[Table, list[str]]:
    reference = jax.jit(with_gradients(through_core(problem, "reference")))(*arrays)
    names = ("out", *GRADIENTS)
    errors = {name: error(a, b) for name, a, b in zip(names, results, reference, strict=True)}
    tolerance = TOLERANCE[problem.dtype]
    rows = [(name, found.norm, found.worst, tolerance) for name, found in errors.items()]
    table = Table("relative error against backend='reference'", ("", "norm", "worst", "allowed"), rows)
    return table, list(faults(errors, tolerance))


def _pace(firsts: Mapping[str, float], medians: Mapping[str, float], flops: Mapping[str, float]) -> Table:
    rows = [(name, firsts[name] * 1e3, medians[name] * 1e3, flops[name] / medians[name] / 1e9) for name in medians]
    return Table("time", ("", "first call, ms", "median, ms", "GFLOP/s"), rows)


def _flops(explanation: ejkernel_core.Explanation) -> dict[str, float]:
    """The arithmetic that the operations say is needed at least."""
    forward, backward = _cost(explanation), _cost(explanation.backward)
    return {"forward": forward, "forward+backward": forward + backward}


def _cost(explanation: ejkernel_core.Explanation | None) -> float:
    if explanation is None or explanation.plan is None:
        return 0.0
    cost = ejkernel_core.registry.operation(explanation.op).cost
    return cost(explanation.plan.invocation).flops if cost else 0.0
