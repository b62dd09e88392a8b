'''The suite of an operation: its examples with every kernel and peer, checked and timed in one run.

A suite is a short module::

    """rms_norm: against plain JAX, torch, and the copy rate of the card."""

    from ejkernel_bench import suite

    def by_xla(arguments):
        eps = arguments["eps"]
        return lambda x, weight: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * weight

    MINIMA = [suite.Minimum("forward", suite.COPY, 0.92), suite.Minimum("forward+backward", "XLA", 1.35)]

    def run(backend=None, rounds=suite.ROUNDS, small=False):
        names = {"rows 8"} if small else None
        return suite.run("rms_norm", {"XLA": by_xla}, MINIMA, names=names, backend=backend, rounds=rounds)

and an entry point ``rms_norm = "my_package.rms_norm"`` in the group ``ejkernel.benchmarks``. Its name is given to
``ejkernel bench``.
'''

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import attrs
import click
import jax
import jax.numpy as jnp

import ejkernel_core
from ejkernel_core import Cost, Example, NoKernel, Registry

from ._calls import (
    PASSES,
    Inputs,
    Pass,
    Results,
    Run,
    abstract_inputs,
    benchmark_examples,
    by_core,
    checked_runs,
    correct_runs,
    describe_fault,
    draw,
    jitted,
    options_of,
    plans,
    shapes_of,
    tolerance_of,
)
from ._figures import Figures, figures_of
from ._grouped_products import NotTuned
from ._memory import GIB, MEMORY_SHARE, memory_limit, planned_bytes, temporary_bytes
from ._peers import OnOtherArrays, Peer, Prepared, TorchFunction, bound, is_installed, optional, program_of
from ._report import Bar, Cell, Report, Table
from ._rows import Rows, announce
from ._threads import WORKERS, in_threads
from ._timing import Times

__all__ = [
    "COPY",
    "OURS",
    "PASSES",
    "ROUNDS",
    "Bar",
    "Measurement",
    "Minimum",
    "OnOtherArrays",
    "Peer",
    "Report",
    "Rows",
    "Table",
    "TorchFunction",
    "announce",
    "backends_of",
    "is_installed",
    "optional",
    "run",
]

#: The other contenders: the core's choice, and a copy on the device of the least bytes that the pass reads and writes.
OURS, COPY = "ejkernel", "copy"
ROUNDS = 5
#: From an example and a pass to its least work.
Work = Callable[[Example, str], Cost]
#: From an example, its inputs, a contender, its results and those of the reference to what is wrong, in sentences.
Check = Callable[[Example, Inputs, str, Results, Results], Iterable[str]]
#: From a measurement to more columns.
Columns = Callable[["Measurement"], Mapping[str, Cell]]
#: How many calls are compiled before they are measured: what threads do at once.
GROUP = WORKERS


@attrs.frozen
class Minimum:
    """The least speed of a contender in a pass, by default of the core's choice, relative to another contender."""

    pass_name: str
    #: A peer, a backend or ``COPY``.
    over: str
    ratio: float
    #: Whether it is for an example. By default it is for all.
    applies: Callable[[Example], bool] = lambda example: True
    #: One figure for all examples: the worst. Otherwise, each example has its own.
    is_worst: bool = False
    #: A backend, for the minimum of a kernel itself. It applies where the kernel takes the call.
    of: str = OURS


@attrs.frozen(eq=False)
class Measurement:
    """One pass of an example."""

    example: Example
    pass_name: str
    work: Cost
    #: Of all contenders.
    figures: Figures
    #: The names of our kernels.
    kernels: str
    #: By contender of JAX, the bytes of its temporaries by the compiler; none where they are not asked for.
    temporaries: Mapping[str, int] = attrs.field(factory=dict)

    @property
    def seconds(self) -> dict[str, float]:
        """Medians by contender."""
        return {name: one.median for name, one in self.times.items()}

    def over_ours(self, names: Iterable[str]) -> dict[str, Cell]:
        """Columns of the times of others, relative to that of the core's choice."""
        seconds = self.seconds
        return {f"{name} / {OURS}": seconds[name] / seconds[OURS] for name in names if name in seconds}

    def over_best(self, names: Iterable[str]) -> float | None:
        """The time of the core's choice, relative to the best of these; None where none of them was measured."""
        others = [seconds for name, seconds in self.seconds.items() if name in set(names)]
        return self.seconds[OURS] / min(others) if others else None

    def beside(self) -> dict[str, Cell]:
        """The columns behind the others."""
        memory = {memory_column(name): size / GIB for name, size in self.temporaries.items() if name in self.times}
        return {**self.figures.beside(), **memory}

    @property
    def times(self) -> Mapping[str, Times]:
        """By contender."""
        return self.figures.times

    def row(self, others: Sequence[str]) -> tuple[Cell, ...]:
        """A row of the table."""
        times, work, seconds = self.times, self.work, self.times[OURS].median
        rates: list[Cell] = [amount / seconds / 1e12 if amount else "-" for amount in (work.flops, work.bytes)]
        ratio: Cell = times[COPY].median / seconds if work.bytes else "-"
        cells = [times[name].scaled(1e-3)[:2] if name in times else ("-", "-") for name in (COPY, *others)]
        name, own = f"{self.example.name}, {self.pass_name}", times[OURS].scaled(1e-3)[:2]
        return name, *own, *rates, ratio, *(cell for pair in cells for cell in pair), self.kernels


def run(
    operation: str,
    peers: Mapping[str, Peer | str | None] | None = None,
    minima: Iterable[Minimum] = (),
    *,
    examples: Iterable[Example] | None = None,
    names: Collection[str] | None = None,
    backend: str | None = None,
    backends: Collection[str] | None = None,
    reference: str | None = None,
    work: Work | None = None,
    check: Check | None = None,
    columns: Columns = lambda measurement: {},
    bars: Callable[[Sequence[Measurement]], Iterable[Bar]] = lambda measurements: (),
    rounds: int = ROUNDS,
    has_memory: bool = False,
    registry: Registry = ejkernel_core.registry,
) -> Report:
    """Measure an operation: each example forward, and forward+backward where it has gradients.

    The contenders are the core's choice (or ``backend``), each of the ``backends`` (by default all) that takes the
    call, and each peer. A peer is a function of an example's arguments, large arrays as shapes. It returns a
    function of the arrays by name, of JAX or in ``TorchFunction``, or None where it cannot do the call. None in
    place of a peer is a peer that is not installed, and a text is the reason why it is not measured; the report
    says so. A contender with wrong results is reported, and not timed.

    ``examples`` are by default those of the operation for the use "benchmark". On a CPU, only examples with these
    ``names`` are measured. ``reference`` is the backend of the expected results, in a wider dtype, where the
    operation's own reference takes too long. ``work`` is the least work of a pass of an example, where the
    operation's cost, which knows shapes alone, is not that of the values. ``check`` says what is wrong with results
    that may differ from the reference's, as those that are drawn at random. ``columns`` has more columns of a row, and
    ``bars`` limits of other figures than ``minima``. With ``has_memory`` there are columns of the temporaries that the
    compiler plans. A contender that does not fit into the memory is told, and not measured. The programs of some calls
    are compiled in parallel, and then these calls are measured; the device runs one thing at a time.
    """
    if jax.default_backend() == "cpu" and names is None:
        return Report(operation, (), text=f"{operation}: there is no accelerator here; --small measures on the CPU")
    if examples is None:
        examples = benchmark_examples(operation, registry)
    examples = [example for example in examples if names is None or example.name in names]
    if unknown_names := set(names or ()) - {example.name for example in examples}:
        raise ValueError(f"{operation} has no examples {', '.join(sorted(unknown_names))}")
    installed = {name: peer for name, peer in (peers or {}).items() if callable(peer)}
    work = work or partial(least_work, registry=registry)
    if backends is None or backend is not None:
        backends = registry.backends(operation) if backend is None else ()
    reference = reference or registry.operation(operation).reference
    contenders = _Contenders(registry, backend, tuple(backends), installed, reference)
    start = ("", OURS, "range", "TFLOP/s", "TB/s", "of copy rate")
    others = (column for name in (COPY, *contenders.names()) for column in (name, "range"))
    title = f"{operation}: milliseconds, medians of {rounds} rounds in turn"
    rows = Rows(title, (*start, *others, "kernels"), series=(OURS, COPY, *contenders.names()))
    measurements: list[Measurement] = []
    faults: list[str] = []
    notes: list[str] = []
    for programs in _compiled_in_groups(contenders, examples):
        notes += programs.notes
        for measurement in _measure(programs, registry, work, check, rounds, faults):
            if has_memory:
                measurement = attrs.evolve(measurement, temporaries=programs.temporaries[measurement.pass_name])
            measurements.append(measurement)
            beside = {**columns(measurement), **measurement.beside()}
            rows.add(*measurement.row(contenders.names()), beside=beside)
    notes += [fault for fault in faults if is_absence(fault)]
    faults = [fault for fault in faults if not is_absence(fault)]
    text = "\n".join(line for line in (_absences(operation, peers or {}), *notes) if line)
    return Report(operation, [rows.table()], [*_bars(measurements, minima), *bars(measurements)], faults, text)


def memory_column(contender: str) -> str:
    """The name of the column of its temporaries."""
    return f"{contender}, GiB"


def is_out_of_memory(fault: str) -> bool:
    """Whether a call failed for want of memory."""
    return "RESOURCE_EXHAUSTED" in fault or "OutOfMemoryError" in fault


def is_absence(fault: str) -> bool:
    """Whether a contender was not measured for a reason that says nothing about its results."""
    return is_out_of_memory(fault) or NotTuned.__name__ in fault


def _absences(operation: str, peers: Mapping[str, Peer | str | None]) -> str:
    """The peers that are not measured: those that are not installed in one line, and each reason in its own."""
    absent = ", ".join(name for name, peer in peers.items() if peer is None)
    lines = [f"{operation}: not installed, and not measured: {absent}"] if absent else []
    lines += [f"{operation}: {name} is not measured: {why}" for name, why in peers.items() if isinstance(why, str)]
    return "\n".join(lines)


def backends_of(operation: str, kernels: str | None, registry: Registry = ejkernel_core.registry) -> tuple[str, ...]:
    """Those that ``--kernels`` names: several with commas, "all", or none without it."""
    installed = registry.backends(operation)
    if kernels is None or kernels == "all":
        return tuple(installed) if kernels else ()
    names = tuple(name.strip() for name in kernels.split(","))
    if unknown := [name for name in names if name not in installed]:
        raise click.UsageError(
            f"--kernels: {operation} has no {', '.join(unknown)}; it has {', '.join(installed)}, or all"
        )
    return names


def named_calls(benchmark: str, parts: Mapping[str, Sequence[Any]], words: Iterable[str]) -> dict[str, Any]:
    """By name, the calls of parts and single ones."""
    every = {call.name: call for calls in parts.values() for call in calls}
    chosen: dict[str, Any] = {}
    for word in words:
        calls = parts.get(word, (every[word],) if word in every else ())
        if not calls:
            similar = [name for name in every if name.startswith(word)]
            similar = similar or difflib.get_close_matches(word, [*parts, *every], 1)
            hint = f"did you mean {similar[0]}?" if similar else f"there are {', '.join(parts)}"
            raise click.UsageError(f"no part or call of {benchmark} is named {word}; {hint}")
        chosen |= {call.name: call for call in calls}
    return chosen


def _compiled_in_groups(contenders: _Contenders, examples: Sequence[Example]) -> Iterator[_Programs]:
    """The programs of each example. The first rows are there before the last program is compiled."""
    for first in range(0, len(examples), GROUP):
        group = examples[first : first + GROUP]
        announce(f"compiling {len(group)} of {len(examples)} calls for all contenders")
        for programs in in_threads(contenders.programs, group):
            # XLA runs programs while it compiles. What had no memory for that beside others is compiled alone.
            is_alone = any(map(is_out_of_memory, programs.faults))
            yield contenders.programs(programs.example) if is_alone else programs


def _measure(
    programs: _Programs, registry: Registry, work: Work, check: Check | None, rounds: int, faults: list[str]
) -> Iterator[Measurement]:
    """The passes of an example whose results are right, one by one. What is wrong is added to the faults."""
    faults += programs.faults
    for pass_name in programs.expected:
        try:
            measurement = _measure_pass(programs, pass_name, registry, work, check, rounds, faults)
        except Exception as fault:  # the others are measured all the same
            faults.append(f"{pass_name}, {programs.example.name}: {describe_fault(fault)}")
            continue
        if measurement is not None:
            yield measurement


def _measure_pass(
    programs: _Programs,
    pass_name: str,
    registry: Registry,
    work: Work,
    check: Check | None,
    rounds: int,
    faults: list[str],
) -> Measurement | None:
    example = programs.example
    runs, new_faults = _right_runs(programs, pass_name, draw(example, registry), check)
    faults += new_faults
    if OURS not in runs:
        return None
    least = work(example, pass_name)
    figures = figures_of({**runs, COPY: copy_of(least.bytes)}, rounds, aside=[COPY])
    return Measurement(example, pass_name, least, figures, _kernels(runs[OURS]))


def _right_runs(
    programs: _Programs, pass_name: str, inputs: Inputs, check: Check | None
) -> tuple[dict[str, Run], list[str]]:
    """The contenders with right results, and what is wrong with the others."""
    example, runs = programs.example, programs.runs(pass_name, inputs)
    label, names = f"{pass_name}, {example.name}", inputs.names(pass_name)
    expected = programs.results(pass_name, inputs)
    if check is None:
        tolerances = programs.tolerances(pass_name)
        return correct_runs(runs, label, expected, names, tolerance_of(example), tolerances)

    def wrong(contender: str, results: Results) -> Iterator[str]:
        faults = check(example, inputs, contender, results, expected)
        return (f"{contender}, {label}: {fault}" for fault in faults)

    return checked_runs(runs, label, wrong)


@attrs.frozen(eq=False)
class _Programs:
    """All that runs for an example but the copy, by pass."""

    example: Example
    #: The dtype of the inputs of the reference, or None for their own.
    wide_dtype: str | None
    expected: Mapping[str, Pass]
    contenders: Mapping[str, Mapping[str, Pass | Prepared]]
    faults: Sequence[str]
    #: What does not fit, and is not run.
    notes: Sequence[str] = ()
    #: Bytes by pass and contender of JAX, by the compiler.
    temporaries: Mapping[str, Mapping[str, int]] = attrs.field(factory=dict)

    def results(self, pass_name: str, inputs: Inputs) -> Results:
        """The results of the reference."""
        with _wide(self.wide_dtype):
            wide_inputs = inputs if self.wide_dtype is None else inputs.astype(self.wide_dtype)
            results: Results = jax.block_until_ready(bound(self.expected[pass_name], pass_name, wide_inputs)())
            return results

    def runs(self, pass_name: str, inputs: Inputs) -> dict[str, Run]:
        """The contenders, with the arrays."""
        return {name: bound(program, pass_name, inputs) for name, program in self.contenders[pass_name].items()}

    def tolerances(self, pass_name: str) -> dict[str, float]:
        """Of the contenders that have their own."""
        prepared = {n: one for n, one in self.contenders[pass_name].items() if isinstance(one, Prepared)}
        return {name: one.tolerance for name, one in prepared.items() if one.tolerance is not None}


@attrs.frozen(eq=False)
class _Contenders:
    """All that is measured but the copy."""

    registry: Registry
    #: Of our own call; None for the core's choice.
    backend: str | None
    #: Those that are measured alone.
    backends: tuple[str, ...]
    peers: Mapping[str, Peer]
    #: The backend of the expected results.
    reference: str

    def names(self) -> list[str]:
        """All but our own call."""
        return [*self.backends, *self.peers]

    def programs(self, example: Example) -> _Programs:
        """Those that take the example and the reference, compiled. Nothing runs."""
        inputs = abstract_inputs(example, self.registry)
        contenders: dict[str, dict[str, Pass | Prepared]] = {}
        faults: list[str] = []
        notes: list[str] = []
        temporaries: dict[str, dict[str, int]] = {}
        passes = PASSES if example.wrt else PASSES[:1]
        for pass_name in passes:
            contenders[pass_name], temporaries[pass_name] = {}, {}
            for name in (OURS, *self.names()):
                try:
                    program = self._program(name, example, inputs, pass_name)
                    if isinstance(program, Pass):
                        compiled = program.compile()
                        temporaries[pass_name][name] = temporary_bytes(compiled)
                        if excess := excess_of(compiled):
                            notes.append(f"{name}, {pass_name}, {example.name}: {excess}")
                            continue
                except Exception as fault:  # the other contenders are measured all the same
                    faults.append(f"{name}, {pass_name}, {example.name}: {describe_fault(fault)}")
                    continue
                if program is not None:
                    contenders[pass_name][name] = program
        wide_dtype = (
            None if inputs.is_quantized else "float64" if example.dtype in ("float32", "float64") else "float32"
        )
        reference = by_core(example, self.reference, self.registry)
        with _wide(wide_dtype):
            wide_inputs = inputs if wide_dtype is None else inputs.astype(wide_dtype)
            expected = {pass_name: jitted(reference, pass_name, wide_inputs) for pass_name in passes}
            for program in expected.values():
                with suppress(Exception):  # it is reported when it runs
                    program.compile()
        return _Programs(example, wide_dtype, expected, contenders, faults, notes, temporaries)

    def _program(self, name: str, example: Example, inputs: Inputs, pass_name: str) -> Pass | Prepared | None:
        if name in self.peers:
            return program_of(self.peers[name], example, inputs, pass_name)
        if name == OURS:
            return jitted(by_core(example, self.backend, self.registry), pass_name, inputs)
        if not _takes(name, example, pass_name, self.registry):
            return None
        return jitted(by_core(example, name, self.registry), pass_name, inputs)


def excess_of(compiled: Any) -> str:
    """Why a program does not fit into the memory of the device; empty where it does, or nobody knows."""
    limit, planned = memory_limit(), planned_bytes(compiled)
    if limit is None or planned <= MEMORY_SHARE * limit:
        return ""
    return f"it does not fit: its plan takes {planned / GIB:.1f} of {limit / GIB:.1f} GiB"


def _wide(dtype: str | None) -> AbstractContextManager[Any]:
    return jax.enable_x64(True) if dtype == "float64" else nullcontext()


def _kernels(run: Run) -> str:
    return run.kernels() if isinstance(run, Pass) else ""


def _takes(backend: str, example: Example, pass_name: str, registry: Registry) -> bool:
    needed = 1 if pass_name == PASSES[0] or registry.operation(example.op).backward is None else 2
    try:
        return len(plans(example, backend, registry)) >= needed
    except NoKernel:
        return False


def least_work(example: Example, pass_name: str, registry: Registry = ejkernel_core.registry) -> Cost:
    """The least work of a pass, by the costs of the operation and of its backward."""
    explanation = registry.explain(
        example.op, **shapes_of(example), **options_of(example), backend=registry.operation(example.op).reference
    )
    costs = [_cost(explanation, registry)]
    if pass_name != PASSES[0]:
        costs.append(_cost(explanation.backward, registry))
    return Cost(sum(cost.flops for cost in costs), sum(cost.bytes for cost in costs))


def _cost(explanation: ejkernel_core.Explanation | None, registry: Registry) -> Cost:
    if explanation is None or explanation.plan is None:
        return Cost(0.0, 0.0)
    cost = registry.operation(explanation.op).cost
    return Cost(0.0, 0.0) if cost is None else cost(explanation.plan.invocation)


def copy_of(size: float) -> Run:
    """A copy on the device that reads half of these bytes and writes the other half."""
    array = jnp.zeros(max(1, int(size) // 8), jnp.float32)
    return partial(jax.jit(lambda x: (jnp.copy(x),)), array)


def _bars(measurements: Sequence[Measurement], minima: Iterable[Minimum]) -> Iterator[Bar]:
    for minimum in minima:
        ratios = {
            one.example.name: one.times[minimum.over].median / one.times[minimum.of].median
            for one in measurements
            if one.pass_name == minimum.pass_name
            and {minimum.over, minimum.of} <= {*one.times}
            and minimum.applies(one.example)
        }
        kernel = "" if minimum.of == OURS else f"{minimum.of} "
        count = f", the worst of {len(ratios)}" if minimum.is_worst else ""
        names = [min(ratios, key=ratios.__getitem__)] if minimum.is_worst and ratios else ratios
        for name in names:
            title = f"{name}, {minimum.pass_name}: {kernel}over {minimum.over}{count}"
            yield Bar(title, ratios[name], minimum.ratio, "times", at_least=True)
