"""The main job: causal attention, forward and backward, on this device: checked, explained, timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

import ejkernel_core
from ejkernel_core import Example
from ejkernel_ops.flash_attention.sizes import self_attention

from ._calls import PASSES, Inputs, Results, by_core, draw, options_of, shapes_of, tolerance_of, with_gradients
from ._errors import error, fault_messages
from ._report import Report, Table
from ._timing import interleaved, once

#: Sizes at which the dense reference fits on the device.
SIZES = {
    "cpu": self_attention(1, 1024, 8, 64),
    "gpu": self_attention(1, 4096, 16, 128, "bfloat16"),
    "tpu": self_attention(1, 4096, 16, 128, "bfloat16"),
}
ROUNDS = 9


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """The size that suits the device."""
    return measure(SIZES.get(jax.default_backend(), SIZES["cpu"]), backend, rounds)


def measure(example: Example, backend: str | None, rounds: int) -> Report:
    """Attention through the core against the reference."""
    inputs = draw(example)
    shapes, options = shapes_of(example), options_of(example)
    explanation = ejkernel_core.explain(example.op, **shapes, backend=backend, **options)
    firsts, contenders, results = _first_calls(example, inputs, backend)
    medians = {pass_name: times.median for pass_name, times in interleaved(contenders, rounds).items()}
    accuracy, messages = _accuracy(example, inputs, results)
    tables = [accuracy, _pace(firsts, medians, _flops(explanation))]
    return Report("run", tables, faults=messages, text=f"{example.op} {example.name}\n\n{explanation}")


def _first_calls(
    example: Example, inputs: Inputs, backend: str | None
) -> tuple[dict[str, float], dict[str, Callable[[], Any]], Results]:
    """Seconds of the first calls, compilation included; the calls; and the results of forward and backward."""
    attention = by_core(example, backend)
    gradients = jax.jit(with_gradients(attention, inputs.wrt))
    contenders = {PASSES[0]: lambda: attention(**inputs.arrays), PASSES[1]: lambda: gradients(*inputs.parts)}
    firsts = {pass_name: once(call) for pass_name, call in contenders.items()}
    return {pass_name: seconds for pass_name, (seconds, _) in firsts.items()}, contenders, firsts[PASSES[1]][1]


def _accuracy(example: Example, inputs: Inputs, results: Results) -> tuple[Table, list[str]]:
    expected = jax.jit(with_gradients(by_core(example, "reference"), inputs.wrt))(*inputs.parts)
    pairs = zip(inputs.names(PASSES[1]), results, expected, strict=True)
    errors = {name: error(result, right) for name, result, right in pairs}
    tolerance = tolerance_of(example)
    rows = [(name, error.norm, error.worst, tolerance) for name, error in errors.items()]
    table = Table("relative error against backend='reference'", ("", "norm", "worst", "allowed"), rows)
    return table, list(fault_messages(errors, tolerance))


def _pace(firsts: Mapping[str, float], medians: Mapping[str, float], flops: Mapping[str, float]) -> Table:
    rows = [
        (pass_name, firsts[pass_name] * 1e3, medians[pass_name] * 1e3, flops[pass_name] / medians[pass_name] / 1e9)
        for pass_name in medians
    ]
    return Table("time", ("", "first call, ms", "median, ms", "GFLOP/s"), rows)


def _flops(explanation: ejkernel_core.Explanation) -> dict[str, float]:
    """The least arithmetic, by the costs of the operations."""
    forward, backward = _cost(explanation), _cost(explanation.backward)
    return {PASSES[0]: forward, PASSES[1]: forward + backward}


def _cost(explanation: ejkernel_core.Explanation | None) -> float:
    if explanation is None or explanation.plan is None:
        return 0.0
    cost = ejkernel_core.registry.operation(explanation.op).cost
    return cost(explanation.plan.invocation).flops if cost else 0.0
