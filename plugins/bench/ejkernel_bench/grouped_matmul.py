"""grouped_matmul on a GPU: each direction against torch, quack, tokamax and jax.lax.

Each part is a run of its own:

  --part forward    the product of eight published shapes, and of each with half of all rows in one group
  --part d_lhs      the gradient of the rows
  --part d_rhs      the gradient of the matrices
  --part decode     few rows, against a copy of the matrices that are used
  --part tuned-forward, tuned-d_lhs, tuned-d_rhs
                    beside tokamax with its own tuning, which takes most of the time; what it does not reach within
                    seven minutes is listed

Without a part, it measures the first four. Every result is compared with ours in float32. A contender that fails, such
as for want of memory, is in the table of what was not measured. Of the skewed calls, only our choice, Gluon, torch
and quack are measured. --small has tiny sizes, which a CPU can run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import geometric_mean
from typing import Any

import attrs
import click
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core import Example
from ejkernel_ops.grouped_matmul.examples import layer_call, layer_d_rhs_call
from ejkernel_ops.grouped_matmul.samples import group_sizes
from ejkernel_ops.grouped_matmul.sizes import PEERS, Layer

from ._calls import PASSES, Inputs, Pass, Run, abstract_inputs, by_core, describe_fault, draw, jitted, mismatches, plans
from ._errors import TOLERANCE
from ._figures import figures_of
from ._grouped_products import NotTuned, by_quack, by_ragged_dot, by_tokamax, by_torch, tuning_of_tokamax
from ._peers import Peer, bound, is_installed, program_of
from ._report import Bar, Cell, Report, joined
from ._rows import Rows, announce
from ._threads import in_threads
from ._timing import Times
from .suite import COPY, OURS, ROUNDS, copy_of

FORWARD = PASSES[0]
RAGGED_DOT, TOKAMAX, TUNED, TORCH, QUACK = "ragged_dot", "tokamax", "tokamax tuned", "torch", "quack"
GLUON, TRITON = "gluon_sm90", "triton"
BACKENDS = (GLUON, TRITON, "xla")
#: Peers whose functions are PyTorch's.
OF_PYTORCH = (TORCH, QUACK)
#: What is measured of skewed calls, besides our own.
OF_SKEWED = (GLUON, TORCH, QUACK)
#: Least geometric means of speeds, relative to a contender; and the least speed of a single case, relative to torch.
MEANS = {TORCH: 1.0, TOKAMAX: 1.6, RAGGED_DOT: 5.0}
WORST = 0.92
#: The most time of a skewed call, relative to the same one of a router; of a choice, relative to the best kernel.
SKEW_LIMIT, CHOICE_LIMIT = 1.05, 1.03
#: The least speed of the portable kernel, relative to Gluon's; the least share of the copy rate in decoding.
TRITON_MEAN, DECODE_MINIMUM = 0.75, 0.9
#: How long tokamax may tune.
TUNING_S = 420.0

#: A call with fewer rows is one of decoding.
DECODE_ROWS = 1024
SMALL = (Layer("96 x 40 x 48, 5 groups", 96, 40, 48, 5), Layer("130 x 32 x 24, 3 groups", 130, 32, 24, 3))
SMALL_DECODE = (Layer("8 x 40 x 48, 12 groups", 8, 40, 48, 12),)


# -- the calls ---------------------------------------------------------------------------------------------------------


def forward_call(layer: Layer) -> Example:
    """The product alone."""
    return attrs.evolve(layer_call(layer), wrt=())


#: By direction.
DIRECTIONS: dict[str, Callable[[Layer], Example]] = {
    "forward": forward_call,
    "d_lhs": partial(layer_call, transpose=True),
    "d_rhs": layer_d_rhs_call,
}


def skewed(example: Example) -> Example:
    """The same call, where the group in the middle has half of all rows."""

    def arguments(draw: int) -> dict[str, Any]:
        values = dict(example.arguments(draw))
        sizes = skewed_sizes(jax.random.key(draw), values["lhs"].shape[0], _groups(values))
        if "boundaries" in values:
            return values | {"boundaries": jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes)])}
        return values | {"group_sizes": sizes}

    return attrs.evolve(example, name=f"{example.name}, half in one", arguments=arguments)


def skewed_sizes(key: Any, rows: int, groups: int) -> jax.Array:
    """Sizes of groups of which the one in the middle has half of all rows.

    >>> skewed_sizes(jax.random.key(0), 100, 4)
    Array([17, 19, 50, 14], dtype=int32)
    """
    others = group_sizes(key, rows - rows // 2, groups - 1)
    middle = groups // 2
    return jnp.concatenate([others[:middle], jnp.full(1, rows // 2, jnp.int32), others[middle:]])


def _groups(values: Mapping[str, Any]) -> int:
    sizes = values.get("group_sizes")
    return int(values["boundaries"].shape[0] - 1 if sizes is None else sizes.shape[0])


def used_bytes(inputs: Inputs) -> float:
    """The bytes of the matrices that have rows."""
    rhs, used = inputs.arrays["rhs"], int((inputs.arrays["group_sizes"] > 0).sum())
    return float(used * np.prod(rhs.shape[1:]) * rhs.dtype.itemsize)


# -- the suite ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class Part:
    """What one run measures."""

    direction: str
    is_decode: bool = False
    has_tuning: bool = False


PARTS = {
    **{name: Part(name) for name in DIRECTIONS},
    "decode": Part("forward", is_decode=True),
    **{f"tuned-{name}": Part(name, has_tuning=True) for name in DIRECTIONS},
}


def peers() -> dict[str, Peer | None]:
    """The peers of a call at any shape."""
    return {
        RAGGED_DOT: by_ragged_dot,
        TOKAMAX: by_tokamax if is_installed("tokamax") else None,
        TORCH: by_torch if is_installed("torch") and jax.default_backend() == "gpu" else None,
        QUACK: by_quack if is_installed("quack") and jax.default_backend() == "gpu" else None,
    }


def run(backend: str | None = None, rounds: int = ROUNDS, small: bool = False, part: str | None = None) -> Report:
    """One part, or those without tokamax's tuning."""
    if part not in (None, *PARTS):
        raise click.UsageError(f"no part of grouped_matmul is called {part}; there are {', '.join(PARTS)}")
    if jax.default_backend() == "cpu" and not small:
        return Report(
            "grouped_matmul", (), text="grouped_matmul: there is no accelerator here; --small measures on the CPU"
        )
    names = [name for name in PARTS if not PARTS[name].has_tuning] if part is None else [part]
    return joined("grouped_matmul", [measure(name, _layers(name, small), backend, rounds) for name in names])


def _layers(name: str, small: bool) -> Sequence[Layer]:
    if small:
        return SMALL_DECODE if PARTS[name].is_decode else SMALL
    return [layer for layer in PEERS if (layer.rows < DECODE_ROWS) == PARTS[name].is_decode]


def measure(name: str, layers: Sequence[Layer], backend: str | None, rounds: int) -> Report:
    """All layers of one part. Programs are compiled first, in parallel, but for those that tokamax tunes."""
    part, installed = PARTS[name], {peer: function for peer, function in peers().items() if function is not None}
    if part.has_tuning:
        installed = {TUNED: by_tokamax} if TOKAMAX in installed else {}
    own = () if backend is not None or part.has_tuning else BACKENDS
    contenders = [OURS, *own, *installed]
    columns = [column for contender in contenders for column in (contender, "range")]
    columns = ["", *columns, "TFLOP/s", "TB/s", *(f"{peer} / {OURS}" for peer in installed), "over the best", "kernels"]
    title = f"grouped_matmul, {name}: milliseconds, medians of {rounds} rounds in turn, bfloat16"
    measurements = _PartOfSuite(part, contenders, installed, backend, rounds, Rows(title, columns, series=contenders))
    announce(f"{name}: compiling {len(layers)} calls for {', '.join(contenders)}")
    for programs in in_threads(measurements.programs, layers):
        measurements.measure(programs)
    tables = [measurements.rows.table()] + ([measurements.absences.table()] if len(measurements.absences) else [])
    absent = [peer for peer, function in peers().items() if function is None]
    text = f"{name}: not installed, and not measured: {', '.join(absent)}" if absent else ""
    return Report(name, tables, list(measurements.bars()), measurements.faults, text)


@attrs.frozen(eq=False)
class Programs:
    """All that is compiled for a layer. Its calls, of a router and skewed, have the same shapes."""

    layer: Layer
    example: Example
    #: In float32, by our kernel in plain JAX.
    expected: Pass
    passes: Mapping[str, Pass]
    #: Why the others do not run.
    failures: Mapping[str, str]


@attrs.frozen(eq=False)
class _PartOfSuite:
    """The contenders of a part, and what has been measured so far."""

    part: Part
    contenders: Sequence[str]
    peers: Mapping[str, Peer]
    backend: str | None
    rounds: int
    rows: Rows
    absences: Rows = attrs.field(factory=lambda: Rows("not measured", ("call", "contender", "reason")))
    faults: list[str] = attrs.field(factory=list)
    #: Seconds by contender, by the name of the layer and whether it is skewed.
    seconds: dict[tuple[str, bool], Mapping[str, float]] = attrs.field(factory=dict)
    deadline: float = attrs.field(factory=lambda: time.monotonic() + TUNING_S)

    # -- what runs -----------------------------------------------------------------------------------------------------

    def programs(self, layer: Layer) -> Programs:
        """Those of all contenders but PyTorch and what tokamax tunes, compiled. Nothing runs."""
        example = DIRECTIONS[self.part.direction](layer)
        inputs = abstract_inputs(example)
        passes, failures = self._compiled(self.contenders, example, inputs)
        expected = jitted(by_core(example, "xla"), FORWARD, inputs.astype("float32"))
        with suppress(Exception):  # it is reported when it runs
            expected.compile()
        return Programs(layer, example, expected, passes, failures)

    def _compiled(
        self, contenders: Iterable[str], example: Example, inputs: Inputs
    ) -> tuple[dict[str, Pass], dict[str, str]]:
        """The compiled programs, and the reasons of those that cannot be compiled."""
        passes: dict[str, Pass] = {}
        failures: dict[str, str] = {}
        for contender in contenders:
            try:
                program = self._program(contender, example, inputs)
                if program is not None:
                    program.compile()
                    passes[contender] = program
            except Exception as fault:  # the other contenders are measured all the same
                failures[contender] = _reason(fault)
        return passes, failures

    def _program(self, contender: str, example: Example, inputs: Inputs) -> Pass | None:
        if contender in self.peers:
            program = None if contender == TUNED else program_of(self.peers[contender], example, inputs, FORWARD)
            return program if isinstance(program, Pass) else None
        backend = self.backend if contender == OURS else contender
        plans(example, backend)  # whatever refuses the call says why
        return jitted(by_core(example, backend), FORWARD, inputs)

    def _runs(self, programs: Programs, example: Example, inputs: Inputs) -> Iterator[tuple[str, Run]]:
        for contender in self.contenders:
            if contender in programs.passes:
                yield contender, bound(programs.passes[contender], FORWARD, inputs)
            elif contender in OF_PYTORCH and contender in self.peers:
                program = program_of(self.peers[contender], example, inputs, FORWARD)
                assert program is not None  # it takes every call
                yield contender, bound(program, FORWARD, inputs)
            elif contender == TUNED and (run := self._tuned(example, inputs)) is not None:
                yield contender, run

    def _tuned(self, example: Example, inputs: Inputs) -> Run | None:
        """What tokamax has tuned. It is compiled where the configurations are known, because a later trace is not."""
        announce(f"tokamax is tuning {example.name}")
        program = program_of(by_tokamax, example, inputs, FORWARD)
        assert isinstance(program, Pass)
        try:
            with tuning_of_tokamax(program.function.lower(*program.arguments), self.deadline):
                return partial(program.function.lower(*program.arguments).compile(), *program.arguments)
        except NotTuned as reason:
            self.absences.add(example.name, TUNED, str(reason))
        except Exception as fault:  # the other contenders are measured all the same
            self.absences.add(example.name, TUNED, _reason(fault))
        return None

    # -- measuring -----------------------------------------------------------------------------------------------------

    def measure(self, programs: Programs) -> None:
        """The call as a router has it, and skewed unless it is one of decoding or tuned.

        XLA runs programs while it compiles. What had no memory for that beside other compilations is compiled alone.
        """
        passes, failures = self._compiled(programs.failures, programs.example, abstract_inputs(programs.example))
        programs = attrs.evolve(programs, passes={**programs.passes, **passes}, failures=failures)
        for contender, reason in programs.failures.items():
            self._add_absence(programs.example.name, contender, reason)
        examples = {False: programs.example}
        if not self.part.is_decode and not self.part.has_tuning:
            examples[True] = skewed(programs.example)
        for is_skewed, example in examples.items():
            try:
                self._measure_call(programs, example, is_skewed)
            except Exception as fault:  # the other calls are measured all the same
                self.faults.append(f"{example.name}: {describe_fault(fault)}")

    def _measure_call(self, programs: Programs, example: Example, is_skewed: bool) -> None:
        inputs = draw(example)
        (expected,) = jax.block_until_ready(bound(programs.expected, FORWARD, inputs.astype("float32"))())
        runs = {
            name: run
            for name, run in self._runs(programs, example, inputs)
            if not is_skewed or name in (OURS, *OF_SKEWED)
        }
        runs = {name: run for name, run in runs.items() if self._is_right(name, run, expected, example.name)}
        del expected  # it may have as many bytes as all else
        if OURS not in runs:
            return
        if self.part.is_decode:
            runs[COPY] = copy_of(used_bytes(inputs))
        figures = figures_of(runs, self.rounds, aside=[COPY])
        self.seconds[programs.layer.name, is_skewed] = {name: one.median for name, one in figures.times.items()}
        self.rows.add(*self._row(programs, example, inputs, figures.times), beside=figures.beside())

    def _add_absence(self, call: str, contender: str, reason: str) -> None:
        """List a contender that does not run. For our own choice, which every bar is about, it is a fault too."""
        self.absences.add(call, contender, reason)
        if contender == OURS:
            self.faults.append(f"{OURS}, {call}: {reason}")

    def _is_right(self, contender: str, run: Run, expected: Any, name: str) -> bool:
        """Whether it runs with the right result. A wrong one is a fault."""
        try:
            results = jax.block_until_ready(run())
        except Exception as fault:
            self._add_absence(name, contender, _reason(fault))
            return False
        messages = list(mismatches(f"{contender}, {name}", results, [expected], ["out"], TOLERANCE["bfloat16"]))
        self.faults.extend(messages)
        return not messages

    def _row(self, programs: Programs, example: Example, inputs: Inputs, times: Mapping[str, Times]) -> Iterator[Cell]:
        seconds, layer = {name: one.median for name, one in times.items()}, programs.layer
        yield example.name
        for contender in self.contenders:
            yield from times[contender].scaled(1e-3)[:2] if contender in times else ("-", "-")
        yield 2.0 * layer.rows * layer.k * layer.n / seconds[OURS] / 1e12
        yield used_bytes(inputs) / seconds[OURS] / 1e12 if self.part.is_decode else "-"
        for peer in self.peers:
            yield seconds[peer] / seconds[OURS] if peer in seconds else "-"
        over_best = _over_best(seconds)
        yield "-" if over_best is None else over_best
        yield programs.passes[OURS].kernels()

    # -- bars ----------------------------------------------------------------------------------------------------------

    def bars(self) -> Iterator[Bar]:
        """Speeds relative to others over the calls of routers, and times relative to others of each call."""
        plain = {name: seconds for (name, is_skewed), seconds in self.seconds.items() if not is_skewed}
        if self.part.is_decode:
            for name, seconds in plain.items():
                share = seconds[COPY] / seconds[OURS]
                yield Bar(f"{name}: of the copy rate", share, DECODE_MINIMUM, "times", at_least=True)
        else:
            yield from _mean_bars(plain.values())
        for (name, is_skewed), seconds in self.seconds.items():
            if is_skewed and name in plain:
                ratio = seconds[OURS] / plain[name][OURS]
                yield Bar(f"{name}: half of the rows in one group / as routed", ratio, SKEW_LIMIT, "times")
            if not is_skewed and (over_best := _over_best(seconds)) is not None:
                yield Bar(f"{name}: chosen / best", over_best, CHOICE_LIMIT, "times")


def _reason(fault: Exception) -> str:
    """In a line."""
    return " ".join(describe_fault(fault).split())


def _mean_bars(calls: Any) -> Iterator[Bar]:
    for peer, minimum in MEANS.items():
        if ratios := [seconds[peer] / seconds[OURS] for seconds in calls if peer in seconds]:
            title = f"over {peer}, geometric mean of {len(ratios)}"
            yield Bar(title, geometric_mean(ratios), minimum, "times", at_least=True)
            if peer == TORCH:
                yield Bar(f"over {peer}, the worst of {len(ratios)}", min(ratios), WORST, "times", at_least=True)
    if ratios := [seconds[GLUON] / seconds[TRITON] for seconds in calls if {GLUON, TRITON} <= {*seconds}]:
        title = f"{TRITON} over {GLUON}, geometric mean of {len(ratios)}"
        yield Bar(title, geometric_mean(ratios), TRITON_MEAN, "times", at_least=True)


def _over_best(seconds: Mapping[str, float]) -> float | None:
    """The time of the choice, relative to the best of our kernels."""
    own = [seconds[backend] for backend in BACKENDS if backend in seconds]
    return seconds[OURS] / min(own) if own else None
