"""``flash_attention`` on Hopper, in one run: against cuDNN, what cuDNN refuses against our own plain rate, and what the
core chooses against each kernel that it chooses from.

Times are the device's own: what is short takes Python longer to call than the device to run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from statistics import geometric_mean

import attrs
import jax

from ejkernel_core import NoKernel

from ._contenders import PASSES, Pass, Results, compiled
from ._peers import Peer, peers
from ._problem import Problem, plans, through_core
from ._report import Bar, Cell, Report, Table
from ._roof import CARDS, least_seconds
from ._timing import Times, on_the_device
from .flash_attention import ANCHORS, BF16, LONG, able, exact

#: By head dim and length, batches of short sequences, very long ones, and eight heads that share their keys.
MORE = (
    *(Problem(1, length, 16, dim, BF16) for dim in (64, 256) for length in (512, 1024, 4096, 8192, 16384)),
    *(Problem(1, length, 16, 128, BF16) for length in (512, 1024, 4096)),
    *(Problem(batch, length, 16, 128, BF16) for batch, length in ((32, 512), (16, 1024))),
    Problem(1, 131072, 2, 128, BF16),
    Problem(2, 8192, 32, 128, BF16, kv_heads=4),
)
#: What cuDNN does not do, and the plain call whose rate it is measured by: one over sequences of that mean length.
ALONE = {
    attrs.evolve(LONG, soft_cap=30.0): LONG,
    attrs.evolve(LONG, sinks=True): LONG,
    attrs.evolve(LONG, sequences=8): Problem(8, 2048, 16, 128, BF16),
    attrs.evolve(LONG, window=4095, sinks=True): LONG,
    attrs.evolve(LONG, window=4095, soft_cap=30.0): LONG,
}
#: Over cuDNN: for each of the anchors and in their geometric mean, elsewhere, and where sequences are short.
EACH, MEAN, ELSEWHERE, SHORT = 1.0, 1.05, 0.9, 1.0
#: Of the plain rate, for the work that is really done.
OF_PLAIN = 0.85
#: How much slower than the best of them a choice may be. Where cuDNN takes a call, it is what the XLA kernel would do.
CHOSEN = 1.03
KERNELS = ("triton", "gluon_sm90", "xla")
ROUNDS = 5
#: What takes long is compiling, much of it in Python.
WORKERS = 16
OURS, CUDNN = "ejkernel", "cuDNN"

#: Whose roof is told beside the rates.
CARD = CARDS["NVIDIA H200"]

#: By problem and pass, and by who has done it: seconds.
Found = Mapping[tuple[Problem, str], Mapping[str, float]]


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """On a GPU."""
    if jax.default_backend() != "gpu":
        return Report("hopper", (), text="hopper: there is no GPU here, and nothing was measured")
    cudnn = next(peer for peer in peers() if peer.name == CUDNN)
    return compare([*ANCHORS, *MORE, *ALONE], backend, rounds, cudnn)


@attrs.frozen
class _Ready:
    """A problem with all that runs."""

    problem: Problem
    #: In float32.
    right: Callable[[], Results]
    #: By pass: what the core chooses, and who else takes it.
    ours: Mapping[str, Pass]
    others: Mapping[str, Mapping[str, Callable[[], Results]]]


def compare(problems: Sequence[Problem], backend: str | None, rounds: int, cudnn: Peer) -> Report:
    """One row a problem and pass. All are compiled beforehand, side by side; the device runs one thing at a time. It
    takes minutes: what is found is told on the way.
    """
    faults: list[str] = []

    def prepared(problem: Problem) -> _Ready | None:
        try:
            return _ready(problem, backend, cudnn)
        except Exception as fault:  # the others are measured all the same
            faults.append(f"{problem}: {type(fault).__name__}: {str(fault)[:200]}")
            return None

    with ThreadPoolExecutor(WORKERS) as pool:
        # What the core chooses by may be set in the caller's context, of which a thread of the pool has none.
        contexts = [copy_context() for _ in problems]
        made = pool.map(lambda context, problem: context.run(prepared, problem), contexts, problems)
        ready = [one for one in made if one is not None]
        list(pool.map(_compile, [run for one in ready for run in _all(one)]))
    rows: list[tuple[Cell, ...]] = []
    found: dict[tuple[Problem, str], Mapping[str, float]] = {}
    for one in ready:
        problem = one.problem
        try:
            right = one.right()
        except Exception as fault:
            faults.append(f"{problem}: {type(fault).__name__}: {str(fault)[:200]}")
            continue
        for name in PASSES:
            runs, wrong = able({OURS: one.ours[name], **one.others[name]}, problem, name, right)
            faults += wrong
            if OURS in runs:
                times = on_the_device(runs, rounds)
                print(f"{problem}, {name}: {times[OURS].median * 1e3:.3g} ms", file=sys.stderr, flush=True)
                found[problem, name] = {who: taken.median for who, taken in times.items()}
                rows.append(_row(problem, name, times, _over_best(found, problem, name), one.ours[name].kernels()))
    beside = (CUDNN, f"{CUDNN} / {OURS}", *KERNELS, "over the best")
    columns = ("", OURS, "range", "TFLOP/s", *beside, "roof", "by", "kernels")
    table = Table(f"milliseconds on the device, medians of {rounds} rounds in turn", columns, rows)
    return Report("hopper", [table], list(_bars(found)), faults)


def _ready(problem: Problem, backend: str | None, cudnn: Peer) -> _Ready:
    arrays, extras = problem.arrays(), problem.extras()
    ours, others = {}, {}
    for name in PASSES:
        ours[name] = compiled(through_core(problem, backend), name, arrays, extras)
        theirs = cudnn.prepared(problem, arrays, name)
        others[name] = {} if theirs is None else {CUDNN: theirs}
        # Who asks for a kernel has nothing chosen.
        for kernel in KERNELS if backend is None else ():
            if _takes(kernel, problem) and (kernel != "xla" or theirs is None):
                others[name][kernel] = compiled(through_core(problem, kernel), name, arrays, extras)
    return _Ready(problem, exact(problem, arrays), ours, others)


def _takes(kernel: str, problem: Problem) -> bool:
    try:
        return len(plans(problem, kernel)) == len(PASSES)
    except NoKernel:
        return False


def _all(one: _Ready) -> list[Callable[[], Results]]:
    return [one.right, *one.ours.values(), *(run for runs in one.others.values() for run in runs.values())]


def _compile(run: Callable[[], Results]) -> None:
    """Whatever is wrong is told when it runs."""
    if isinstance(run, Pass):
        with suppress(Exception):
            run.compile()


def _row(
    problem: Problem, name: str, times: Mapping[str, Times], over_best: float | None, kernels: str
) -> tuple[Cell, ...]:
    ours, spread, *_ = times[OURS].scaled(1e-3)
    rate = problem.flops(name) / times[OURS].median / 1e12
    others = {who: times[who].scaled(1e-3)[0] if who in times else "-" for who in (CUDNN, *KERNELS)}
    ratio = times[CUDNN].median / times[OURS].median if CUDNN in times else "-"
    beside = (others.pop(CUDNN), ratio, *others.values(), "-" if over_best is None else over_best)
    limit, least = max(least_seconds(problem, name, CARD).items(), key=lambda one: one[1])
    return f"{problem}, {name}", ours, spread, rate, *beside, problem.flops(name) / least / 1e12, limit, kernels


def _over_best(found: Found, problem: Problem, name: str) -> float | None:
    """The time of what the core chose, over the best that others do: of forward and backward each the best one's."""
    forward, taken = found.get((problem, PASSES[0]), {}), found[problem, name]
    others = [who for who in taken if who != OURS and who in forward]
    if not set(KERNELS) & {*others}:
        return None
    best = min(forward[who] for who in others)
    if name != PASSES[0]:
        best += min(taken[who] - forward[who] for who in others)
    return taken[OURS] / best


def _bars(found: Found) -> Iterator[Bar]:
    over = {what: taken[CUDNN] / taken[OURS] for what, taken in found.items() if CUDNN in taken}
    for name in PASSES:
        anchors = [over[problem, name] for problem in ANCHORS if (problem, name) in over]
        if len(anchors) == len(ANCHORS):
            what = f"the {len(anchors)} anchors, {name}: over cuDNN, geometric mean"
            yield Bar(what, geometric_mean(anchors), MEAN, "times", at_least=True)
    for (problem, name), taken in found.items():
        if (problem, name) in over:
            bar = EACH if problem in ANCHORS else SHORT if problem.length <= 1024 else ELSEWHERE
            yield Bar(f"{problem}, {name}: over cuDNN", over[problem, name], bar, "times", at_least=True)
        elif problem in ALONE and (plain := (ALONE[problem], name)) in found:
            least = found[plain][OURS] * problem.flops(name) / plain[0].flops(name)
            yield Bar(f"{problem}, {name}: of the plain rate", least / taken[OURS], OF_PLAIN, "times", at_least=True)
        if (ratio := _over_best(found, problem, name)) is not None:
            yield Bar(f"{problem}, {name}: chosen / best", ratio, CHOSEN, "times")
