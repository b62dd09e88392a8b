"""Attention on this device, step by step: what is chosen, whether it is right, and how fast it is.

Every step is announced before it begins, so that nobody waits without knowing for what.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

import ejkernel_core
from ejkernel_cli.explain import origin_of
from ejkernel_core import Example, Explanation, Plan, Registry
from ejkernel_core.extend import OPERATIONS
from ejkernel_ops.flash_attention.sizes import self_attention

from ._attention import by_jax_nn
from ._calls import (
    PASSES,
    Inputs,
    Results,
    by_core,
    describe,
    draw,
    jitted,
    options_of,
    shapes_of,
    tolerance_of,
    with_gradients,
)
from ._errors import error, fault_messages
from ._report import Report, Table
from ._rows import announce
from ._timing import interleaved, once
from .suite import least_work

#: Sizes at which the dense reference fits on the device.
SIZES = {
    "cpu": self_attention(1, 1024, 8, 64),
    "gpu": self_attention(1, 4096, 16, 128, "bfloat16"),
    "tpu": self_attention(1, 4096, 16, 128, "bfloat16"),
}
ROUNDS = 9
STEPS = 5
#: Of a line with the reasons of kernels, before it is indented.
WIDTH = 92
OURS, PEER = "ejkernel", "jax.nn"

Run = Callable[[], Any]


def kernels_here(registry: Registry = ejkernel_core.registry) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """The operations that have the same backends, and those backends that run on this device, the preferred first."""
    platform = jax.default_backend()
    operations: dict[tuple[str, ...], list[str]] = {}
    for operation in registry.names(OPERATIONS):
        kernels, _ = registry.kernels(operation)
        backends = {kernel.backend for kernel in kernels if kernel.rank_on(platform) is not None}
        operations.setdefault(tuple(sorted(backends, key=_reference_last)), []).append(operation)
    for backends_of_operations, names in operations.items():
        yield tuple(names), list(backends_of_operations)


def _reference_last(backend: str) -> tuple[bool, str]:
    return backend == "reference", backend


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """The size that suits the device."""
    return measure(SIZES.get(jax.default_backend(), SIZES["cpu"]), backend, rounds)


def measure(example: Example, backend: str | None, rounds: int) -> Report:
    """Attention through the core, against the reference and against ``jax.nn``."""
    announce(f"{example.op} {example.name}: batch, length, heads and head dim")
    _step(1, "which kernels run, and why")
    explanation = ejkernel_core.explain(example.op, **shapes_of(example), backend=backend, **options_of(example))
    for line in reasons(explanation):
        announce(f"  {line}")
    if explanation.plan is None:
        raise ejkernel_core.NoKernel(explanation.error or "no kernel can run the call")
    inputs = draw(example)
    runs, results = _first_calls(example, inputs, backend)
    accuracy, faults = _accuracy(example, inputs, results)
    pace = _pace(example, inputs, runs, rounds)
    title = f"{example.op} {example.name}"
    return Report(title, [accuracy, pace], faults=faults, text=f"{title}\n\n{explanation}")


def _step(number: int, text: str) -> None:
    announce(f"\n{number}/{STEPS}  {text}")


def reasons(explanation: Explanation) -> Iterator[str]:
    """What was chosen for the call and for its gradients, with the reasons of the other kernels; in a few lines."""
    plan, backward = explanation.plan, explanation.backward
    if plan is None:
        yield f"{explanation.op}: {' '.join((explanation.error or '').split())}"
    else:
        yield f"{explanation.op}: {plan.kernel.backend}, {plan.cfg}, by {origin_of(plan)}"
        if (record := plan.choice.record) and record.provenance:
            yield f"  {record.provenance}"
        yield from (f"  {line}" for line in _others(plan))
    if backward is not None:
        yield from reasons(backward)


def _others(plan: Plan) -> Iterator[str]:
    """The other kernels: those with the same reason in one line."""
    backends: dict[str, list[str]] = {}
    for verdict in plan.verdicts:
        if verdict.status != "chosen":
            status = "also able" if verdict.status == "able" else verdict.status
            text = f"{status}, {' '.join(verdict.reason.split())}"
            backends.setdefault(text.removesuffix(", "), []).append(verdict.name.rpartition(".")[2])
    for text, names in backends.items():
        line = f"{', '.join(names)}: {text}"
        yield from textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _first_calls(example: Example, inputs: Inputs, backend: str | None) -> tuple[dict[str, Run], Results]:
    """The calls of both passes, and the results of forward and backward."""
    attention = by_core(example, backend)
    gradients = jax.jit(with_gradients(attention, inputs.wrt))
    runs: dict[str, Run] = {PASSES[0]: lambda: attention(**inputs.arrays), PASSES[1]: lambda: gradients(*inputs.parts)}
    for number, (pass_name, call) in enumerate(runs.items(), 2):
        _step(number, f"{pass_name}: the first call, which compiles")
        seconds, results = once(call)
        announce(f"  {seconds:.1f} s")
    return runs, results


def _accuracy(example: Example, inputs: Inputs, results: Results) -> tuple[Table, list[str]]:
    _step(4, "is it right? The reference, in plain JAX, computes the same")
    expected = jax.jit(with_gradients(by_core(example, "reference"), inputs.wrt))(*inputs.parts)
    pairs = zip(inputs.names(PASSES[1]), results, expected, strict=True)
    errors = {name: error(result, right) for name, result, right in pairs}
    tolerance = tolerance_of(example)
    rows = [(name, error.norm, error.worst, tolerance) for name, error in errors.items()]
    table = Table("relative error against backend='reference'", ("", "norm", "worst", "allowed"), rows)
    faults = list(fault_messages(errors, tolerance))
    _announce_table(table)
    announce("  " + ("WRONG: " + "; ".join(faults) if faults else "right: every error is below what is allowed"))
    return table, faults


def _pace(example: Example, inputs: Inputs, runs: Mapping[str, Run], rounds: int) -> Table:
    """Both passes in turn with those of ``jax.nn``."""
    _step(5, f"is it fast? In turn with jax.nn.dot_product_attention, {rounds} rounds")
    peer = by_jax_nn(describe(example))
    assert peer is not None  # it takes every plain call
    rows = []
    for pass_name, own in runs.items():
        times = interleaved({OURS: own, PEER: jitted(peer, pass_name, inputs)}, rounds)
        ours, theirs = times[OURS].median, times[PEER].median
        rate = least_work(example, pass_name).flops / ours
        rows.append((pass_name, ours * 1e3, theirs * 1e3, theirs / ours, rate / 1e9))
    title = f"milliseconds, medians of {rounds} rounds in turn"
    table = Table(title, ("", OURS, PEER, f"{PEER} / {OURS}", f"GFLOP/s of {OURS}"), rows, series=(OURS, PEER))
    _announce_table(table)
    for pass_name, _, _, ratio, _ in rows:
        announce(f"  {pass_name}: {ratio:.2g} times the speed of jax.nn")
    return table


def _announce_table(table: Table) -> None:
    for line in str(table).splitlines():
        announce(f"  {line}")
