"""Attention on Hopper: against cuDNN, FlashAttention 3 and 4, our own plain rate, and each kernel.

A call that cuDNN refuses is compared with the rate of a plain call of ours. The choice of the core is compared with
each kernel that it chooses from. FA3 and FA4 are measured where they are installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from statistics import geometric_mean
from types import MappingProxyType

import attrs
import jax

from ejkernel_core import Example, NoKernel
from ejkernel_ops.flash_attention.sizes import COMMON, SCALED, WITHOUT_CUDNN, self_attention

from . import _flash_attention_peers
from ._attention import by_cudnn, flops, sizes
from ._calls import (
    PASSES,
    Inputs,
    Pass,
    Run,
    by_core,
    correct_runs,
    describe_fault,
    draw,
    jitted,
    plans,
    tolerance_of,
)
from ._figures import figures_of
from ._peers import Peer, pass_of
from ._report import Bar, Cell, Report
from ._roof import CARDS, least_seconds
from ._rows import Rows, announce
from ._threads import in_threads
from ._timing import Times
from .flash_attention import LONG, installed_peers, reference

#: The plain call for each that cuDNN refuses: of packed sequences, a batch of sequences of their mean length.
PLAIN = {
    example.name: self_attention(8, 2048, 16, 128, "bfloat16").name if "sequences" in example.name else LONG
    for example in WITHOUT_CUDNN
}
#: Minimum ratios to cuDNN: for each of the common sizes, for their geometric mean, for others, and for short ones.
COMMON_MINIMUM, MEAN_MINIMUM, OTHER_MINIMUM, SHORT_MINIMUM = 1.0, 1.05, 0.9, 1.0
#: The minimum ratio to the plain rate.
PLAIN_MINIMUM = 0.85
#: The most time that a choice may take, relative to the best kernel. cuDNN stands for our XLA kernel where it can.
CHOICE_LIMIT = 1.03
KERNELS = ("triton", "gluon_sm90", "xla")
ROUNDS = 5
OURS, CUDNN = "ejkernel", "cuDNN"

#: The card whose roof is in the table.
CARD = CARDS["NVIDIA H200"]

#: Of all contenders in all passes: the seconds by contender, by the example's name and the pass.
Seconds = Mapping[tuple[str, str], Mapping[str, float]]


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """On a GPU."""
    if jax.default_backend() != "gpu":
        return Report("hopper", (), text="hopper: there is no GPU here, and nothing was measured")
    others, text = installed_peers("hopper", _flash_attention_peers.peers())
    report = compare([*COMMON, *SCALED, *WITHOUT_CUDNN], backend, rounds, by_cudnn, others)
    return attrs.evolve(report, text=text)


@attrs.frozen(eq=False)
class _Contenders:
    """All that runs for an example."""

    example: Example
    inputs: Inputs
    #: Both passes in float32.
    expected: Pass
    #: By pass: the core's choice, and the others that take the call.
    ours: Mapping[str, Pass]
    others: Mapping[str, Mapping[str, Run]]

    def runs(self) -> list[Run]:
        return [self.expected, *self.ours.values(), *(run for runs in self.others.values() for run in runs.values())]


def compare(
    examples: Sequence[Example],
    backend: str | None,
    rounds: int,
    cudnn: Peer,
    peers: Mapping[str, Peer] = MappingProxyType({}),
) -> Report:
    """One row for each example and pass. All are compiled first, in parallel; the device runs one thing at a time.

    It takes minutes, so each row is announced when it is measured. The ``peers`` are further ones, of PyTorch.
    """
    faults: list[str] = []

    def prepared(example: Example) -> _Contenders | None:
        try:
            return _contenders(example, backend, cudnn)
        except Exception as fault:  # the others are measured all the same
            faults.append(f"{example.name}: {describe_fault(fault)}")
            return None

    announce(f"compiling {len(examples)} calls for all contenders")
    all_contenders = [contenders for contenders in in_threads(prepared, examples) if contenders is not None]
    in_threads(_compile, [run for contenders in all_contenders for run in contenders.runs()])
    compared = [column for name in (CUDNN, *peers) for column in (name, f"{name} / {OURS}")]
    columns = ("", OURS, "range", "TFLOP/s", *compared, *KERNELS, "over the best")
    title = f"milliseconds, medians of {rounds} rounds in turn"
    rows = Rows(title, (*columns, "roof", "by", "kernels"), series=(OURS, CUDNN, *peers, *KERNELS))
    seconds: dict[tuple[str, str], Mapping[str, float]] = {}
    by_name = {example.name: example for example in examples}
    for contenders in all_contenders:
        example = contenders.example
        try:
            expected = contenders.expected()
        except Exception as fault:
            faults.append(f"{example.name}: {describe_fault(fault)}")
            continue
        for pass_name in PASSES:
            label = f"{pass_name}, {example.name}"
            runs: dict[str, Run] = {OURS: contenders.ours[pass_name], **contenders.others[pass_name]}
            # Only now, because PyTorch copies the arrays.
            by_peer = {name: pass_of(peer, example, contenders.inputs, pass_name) for name, peer in peers.items()}
            runs |= {name: run for name, run in by_peer.items() if run is not None}
            runs, new_faults = correct_runs(
                runs, label, expected, contenders.inputs.names(pass_name), tolerance_of(example)
            )
            faults += new_faults
            if OURS in runs:
                figures = figures_of(runs, rounds)
                times = figures.times
                seconds[example.name, pass_name] = {
                    name: contender_times.median for name, contender_times in times.items()
                }
                ratio = _over_best(seconds, example.name, pass_name)
                cells = _row(example, pass_name, times, peers, ratio, contenders.ours[pass_name].kernels())
                rows.add(*cells, beside=figures.beside())
    return Report("hopper", [rows.table()], list(_bars(seconds, by_name)), faults)


def _contenders(example: Example, backend: str | None, cudnn: Peer) -> _Contenders:
    inputs = draw(example)
    ours, others = {}, {}
    for pass_name in PASSES:
        ours[pass_name] = jitted(by_core(example, backend), pass_name, inputs)
        by_peer = pass_of(cudnn, example, inputs, pass_name)
        others[pass_name] = {} if by_peer is None else {CUDNN: by_peer}
        # With a backend there is no choice to compare.
        for kernel in KERNELS if backend is None else ():
            if _takes(kernel, example) and (kernel != "xla" or by_peer is None):
                others[pass_name][kernel] = jitted(by_core(example, kernel), pass_name, inputs)
    return _Contenders(example, inputs, reference(example, inputs), ours, others)


def _takes(kernel: str, example: Example) -> bool:
    try:
        return len(plans(example, kernel)) == len(PASSES)
    except NoKernel:
        return False


def _compile(run: Run) -> None:
    """A fault is reported when it runs."""
    if isinstance(run, Pass):
        with suppress(Exception):
            run.compile()


def _row(
    example: Example,
    pass_name: str,
    times: Mapping[str, Times],
    peers: Iterable[str],
    over_best: float | None,
    kernels: str,
) -> tuple[Cell, ...]:
    ours, spread, *_ = times[OURS].scaled(1e-3)
    work = flops(example, pass_name) / 1e12
    own = [1e3 * times[name].median if name in times else "-" for name in KERNELS]
    compared = [cell for name in (CUDNN, *peers) for cell in _compared(times, name)]
    limit, least = max(least_seconds(example, pass_name, CARD).items(), key=lambda item: item[1])
    rate = work / times[OURS].median
    best = "-" if over_best is None else over_best
    return f"{example.name}, {pass_name}", ours, spread, rate, *compared, *own, best, work / least, limit, kernels


def _compared(times: Mapping[str, Times], peer: str) -> tuple[Cell, Cell]:
    """The time of a peer, and its ratio to ours."""
    if peer not in times:
        return "-", "-"
    return 1e3 * times[peer].median, times[peer].median / times[OURS].median


def _over_best(seconds: Seconds, name: str, pass_name: str) -> float | None:
    """The time of the choice, relative to the best of the others: to the sum of the best forward and the best backward
    where both passes are measured.
    """
    forward, both_passes = seconds.get((name, PASSES[0]), {}), seconds[name, pass_name]
    others = [contender for contender in (CUDNN, *KERNELS) if contender in both_passes and contender in forward]
    if not set(KERNELS) & {*others}:
        return None
    best = min(forward[contender] for contender in others)
    if pass_name != PASSES[0]:
        best += min(both_passes[contender] - forward[contender] for contender in others)
    return both_passes[OURS] / best


def _bars(seconds: Seconds, examples: Mapping[str, Example]) -> Iterator[Bar]:
    ratios = {key: times[CUDNN] / times[OURS] for key, times in seconds.items() if CUDNN in times}
    common = [example.name for example in COMMON]
    for pass_name in PASSES:
        of_common = [ratios[name, pass_name] for name in common if (name, pass_name) in ratios]
        if len(of_common) == len(common):
            title = f"the {len(common)} common sizes, {pass_name}: over cuDNN, geometric mean"
            yield Bar(title, geometric_mean(of_common), MEAN_MINIMUM, "times", at_least=True)
    for (name, pass_name), times in seconds.items():
        if (name, pass_name) in ratios:
            other_minimum = SHORT_MINIMUM if sizes(examples[name])[1] <= 1024 else OTHER_MINIMUM
            minimum = COMMON_MINIMUM if name in common else other_minimum
            yield Bar(f"{name}, {pass_name}: over cuDNN", ratios[name, pass_name], minimum, "times", at_least=True)
        elif name in PLAIN and (PLAIN[name], pass_name) in seconds:
            work = flops(examples[name], pass_name) / flops(examples[PLAIN[name]], pass_name)
            least = seconds[PLAIN[name], pass_name][OURS] * work
            yield Bar(
                f"{name}, {pass_name}: of the plain rate", least / times[OURS], PLAIN_MINIMUM, "times", at_least=True
            )
        if (ratio := _over_best(seconds, name, pass_name)) is not None:
            yield Bar(f"{name}, {pass_name}: chosen / best", ratio, CHOICE_LIMIT, "times")
