"""moe_route on a GPU: all of it in one call, against its definition in plain JAX, by the device's clock.

Experts are compared with the definition's: those of scores that are nearly equal may differ. The sizes of the groups
and the order of the tokens have to be exactly those of the experts that were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel_core
from ejkernel_core import Example, NoKernel
from ejkernel_ops.moe_route import definition
from ejkernel_ops.moe_route.examples import large

from ._calls import PASSES, Pass, Run, abstract_inputs, benchmark_examples, by_core, describe_fault, draw, jitted, plans
from ._figures import figures_of
from ._peers import bound
from ._report import ABSENT, Bar, Report
from ._rows import Rows, announce
from ._threads import in_threads
from .suite import OURS, ROUNDS

XLA = "XLA"
ABSENTS = (ABSENT, ABSENT)
#: The most milliseconds of a call.
LIMITS = {"65536 tokens, 8 of 128": 0.1}
#: The most time of a choice, relative to the best kernel.
CHOICE_LIMIT = 1.03
#: The largest share of experts that may differ from the definition's, and the largest distance of a weight.
NEAR_TIES, WEIGHT_ERROR = 1e-4, 1e-5
SMALL = (large(96, 16, 4),)


def run(backend: str | None = None, rounds: int = ROUNDS, small: bool = False) -> Report:
    """The measured calls of the operation, or with ``small`` one that a CPU can run."""
    if jax.default_backend() == "cpu" and not small:
        return Report("moe_route", (), text="moe_route: there is no accelerator here; --small measures on the CPU")
    return measure(SMALL if small else benchmark_examples("moe_route"), backend, rounds)


def by_definition(arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """For XLA to fuse what it can."""
    options = {"score": "softmax", "expert_bias": None, "num_groups": None, "renormalize": True, "scaling_factor": 1.0}
    given = {name: value for name, value in arguments.items() if not hasattr(value, "shape")}
    return lambda **arrays: definition.forward({**options, **given, **arrays})


def peers() -> dict[str, Any]:
    """The peers of a call at any shape."""
    return {XLA: by_definition}


def measure(examples: Sequence[Example], backend: str | None, rounds: int) -> Report:
    """One row for each example: the core's choice, each backend that takes the call, and the definition."""
    own = ejkernel_core.registry.backends("moe_route") if backend is None else ()
    contenders = [OURS, *(name for name in own if name != "reference"), XLA]
    columns = [column for name in contenders for column in (name, "range")]
    title = f"moe_route: milliseconds, medians of {rounds} rounds in turn"
    rows = Rows(title, ("", *columns, f"{XLA} / {OURS}", "over the best", "kernels"), series=contenders)
    bars: list[Bar] = []
    faults: list[str] = []
    announce(f"moe_route: compiling {len(examples)} calls for {', '.join(contenders)}")
    compile_all = partial(_compiled, contenders=contenders, backend=backend, faults=faults)
    for example, passes in in_threads(compile_all, examples):
        runs = _right_runs(example, passes, faults)
        if OURS not in runs:
            continue
        figures = figures_of(runs, rounds)
        times = figures.times
        seconds = {name: one.median for name, one in times.items()}
        cells = [cell for name in contenders for cell in (times[name].scaled(1e-3)[:2] if name in times else ABSENTS)]
        best = min((seconds[name] for name in contenders[1:-1] if name in seconds), default=seconds[OURS])
        over_xla = seconds[XLA] / seconds[OURS]
        rows.add(example.name, *cells, over_xla, seconds[OURS] / best, passes[OURS].kernels(), beside=figures.beside())
        if example.name in LIMITS:
            bars.append(Bar(example.name, seconds[OURS] * 1e3, LIMITS[example.name], "ms"))
        if backend is None:
            bars.append(Bar(f"{example.name}: chosen / best", seconds[OURS] / best, CHOICE_LIMIT, "times"))
    return Report("moe_route", [rows.table()], bars, faults)


def _right_runs(example: Example, passes: Mapping[str, Pass], faults: list[str]) -> dict[str, Run]:
    """The contenders with right results; what is wrong is added to the faults."""
    inputs, runs = draw(example), {}
    if XLA not in passes:
        return {}
    expected = jax.block_until_ready(bound(passes[XLA], PASSES[0], inputs)())
    for name, program in passes.items():
        run = bound(program, PASSES[0], inputs)
        try:
            messages = list(wrong_routes(jax.block_until_ready(run()), expected))
        except Exception as fault:  # the other contenders are measured all the same
            messages = [describe_fault(fault)]
        faults += [f"{name}, {example.name}: {message}" for message in messages]
        if not messages:
            runs[name] = run
    return runs


def _compiled(
    example: Example, contenders: Sequence[str], backend: str | None, faults: list[str]
) -> tuple[Example, dict[str, Pass]]:
    """The contenders that take the call."""
    inputs, passes = abstract_inputs(example), {}
    for name in contenders:
        chosen = backend if name == OURS else name
        try:
            if name == XLA:
                function = by_definition(dict(example.arguments(0)))
            else:
                plans(example, chosen, ejkernel_core.registry)
                function = by_core(example, chosen)
            program = jitted(function, PASSES[0], inputs)
            program.compile()
            passes[name] = program
        except NoKernel:
            continue
        except Exception as fault:  # the other contenders are measured all the same
            faults.append(f"{name}, {example.name}: {describe_fault(fault)}")
    return example, passes


def wrong_routes(results: Sequence[Any], expected: Sequence[Any]) -> Iterator[str]:
    """A sentence for each result that is wrong."""
    share, distance, are_sizes_right, is_order_right = jax.device_get(_differences(tuple(results), tuple(expected)))
    if not share <= NEAR_TIES:
        yield f"a share of {share:.1e} of the experts differs; {NEAR_TIES:.1e} is allowed"
    if not distance <= WEIGHT_ERROR:
        yield f"weights of the same experts are off by up to {distance:.1e}; {WEIGHT_ERROR:.1e} is allowed"
    if not are_sizes_right:
        yield "group_sizes are not those of the experts"
    if not is_order_right:
        yield "token_order is not that of the experts"


@jax.jit
def _differences(results: Sequence[Any], expected: Sequence[Any]) -> tuple[Any, ...]:
    (weights, experts, sizes, order), (expected_weights, expected_experts, *_) = results, expected
    is_same = experts == expected_experts
    distance = jnp.where(is_same, jnp.abs(weights - expected_weights), 0).max(initial=0)
    own_sizes, own_order = definition.ordered(experts, sizes.shape[0])
    return (~is_same).mean(), distance, (sizes == own_sizes).all(), (order == own_order).all()
