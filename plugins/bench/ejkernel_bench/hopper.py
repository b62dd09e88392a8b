"""``flash_attention`` on Hopper: against cuDNN, and what cuDNN refuses against our own plain rate, in one run.

Times are the device's own: what is short takes Python longer to call than the device to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import geometric_mean

import attrs
import jax

from ._contenders import PASSES, Results, compiled
from ._peers import Peer, peers
from ._problem import Problem, chosen, through_core
from ._report import Bar, Cell, Report, Table
from ._roof import CARDS, least_seconds
from ._timing import on_the_device
from .flash_attention import ANCHORS, BF16, LONG, able, exact

#: By head dim and length, batches of short sequences, very long ones, and eight heads that share their keys.
MORE = (
    *(Problem(1, length, 16, dim, BF16) for dim in (64, 256) for length in (512, 1024, 4096, 16384)),
    *(Problem(1, length, 16, 128, BF16) for length in (512, 1024, 4096)),
    *(Problem(batch, length, 16, 128, BF16) for batch, length in ((32, 512), (16, 1024))),
    Problem(1, 131072, 2, 128, BF16),
    Problem(2, 8192, 32, 128, BF16, kv_heads=4),
)
#: What cuDNN does not do.
ALONE = (
    attrs.evolve(LONG, soft_cap=30.0),
    attrs.evolve(LONG, sinks=True),
    attrs.evolve(LONG, sequences=8),
    attrs.evolve(LONG, window=4095, sinks=True),
    attrs.evolve(LONG, window=4095, soft_cap=30.0),
)
#: Over cuDNN: for each of the anchors and in their geometric mean, elsewhere, and where sequences are short.
EACH, MEAN, ELSEWHERE, SHORT = 1.0, 1.05, 0.9, 1.0
#: Of the plain rate, for the work that is really done.
OF_PLAIN = 0.85
ROUNDS = 5
#: What takes long is compiling, much of it in Python; and what is right is computed in float32 by each.
WORKERS = 4
OURS, CUDNN = "ejkernel", "cuDNN"

#: Whose roof is told beside the rates.
CARD = CARDS["NVIDIA H200"]

#: By problem and pass: our rate, and cuDNN's time over ours where cuDNN takes it.
Found = Mapping[tuple[Problem, str], tuple[float, float | None]]


def run(backend: str | None = None, rounds: int = ROUNDS) -> Report:
    """On a GPU."""
    if jax.default_backend() != "gpu":
        return Report("hopper", (), text="hopper: there is no GPU here, and nothing was measured")
    cudnn = next(peer for peer in peers() if peer.name == CUDNN)
    return compare([*ANCHORS, *MORE, *ALONE], backend, rounds, cudnn)


def compare(problems: Sequence[Problem], backend: str | None, rounds: int, cudnn: Peer) -> Report:
    """One row a problem and pass. All are compiled and checked beforehand, side by side; then the device is theirs."""
    with ThreadPoolExecutor(WORKERS) as pool:
        ready = [pair for pairs in pool.map(partial(_ready, backend=backend, cudnn=cudnn), problems) for pair in pairs]
    rows: list[tuple[Cell, ...]] = []
    found: dict[tuple[Problem, str], tuple[float, float | None]] = {}
    for (problem, name), runs in ((what, runs) for what, runs, _ in ready if OURS in runs):
        times = on_the_device(runs, rounds)
        ours, spread, *_ = times[OURS].scaled(1e-3)
        theirs = times[CUDNN].scaled(1e-3)[0] if CUDNN in times else None
        ratio = None if theirs is None else theirs / ours
        rate = problem.flops(name) / times[OURS].median / 1e12
        found[problem, name] = rate, ratio
        beside = ("-", "-") if theirs is None or ratio is None else (theirs, ratio)
        limit, least = max(least_seconds(problem, name, CARD).items(), key=lambda one: one[1])
        roof = problem.flops(name) / least / 1e12
        rows.append((f"{problem}, {name}", ours, spread, rate, *beside, roof, limit, chosen(problem, backend)))
    columns = ("", OURS, "range", "TFLOP/s", CUDNN, f"{CUDNN} / {OURS}", "roof", "by", "kernels")
    table = Table(f"milliseconds on the device, medians of {rounds} rounds in turn", columns, rows)
    return Report("hopper", [table], list(_bars(found)), [fault for *_, faults in ready for fault in faults])


def _ready(
    problem: Problem, backend: str | None, cudnn: Peer
) -> list[tuple[tuple[Problem, str], Mapping[str, Callable[[], Results]], list[str]]]:
    """For each pass who runs, and what is wrong with the results of those who do not take part."""
    try:
        arrays = problem.arrays()
        right = exact(problem, arrays)
    except Exception as fault:  # the others are measured all the same
        return [((problem, PASSES[0]), {}, [f"{problem}: {type(fault).__name__}: {str(fault)[:200]}"])]
    found = []
    for name in PASSES:
        runs = {OURS: compiled(through_core(problem, backend), name, arrays, problem.extras())}
        if (theirs := cudnn.prepared(problem, arrays, name)) is not None:
            runs[CUDNN] = theirs
        found.append(((problem, name), *able(runs, problem, name, right)))
    return found


def _bars(found: Found) -> Iterator[Bar]:
    for name in PASSES:
        anchors = [ratio for problem in ANCHORS if (ratio := found.get((problem, name), (0, None))[1]) is not None]
        if len(anchors) == len(ANCHORS):
            what = f"the {len(anchors)} anchors, {name}: over cuDNN, geometric mean"
            yield Bar(what, geometric_mean(anchors), MEAN, "times", at_least=True)
    for (problem, name), (rate, ratio) in found.items():
        if ratio is not None:
            bar = EACH if problem in ANCHORS else SHORT if problem.length <= 1024 else ELSEWHERE
            yield Bar(f"{problem}, {name}: over cuDNN", ratio, bar, "times", at_least=True)
        elif problem in ALONE and (LONG, name) in found:
            part = rate / found[LONG, name][0]
            yield Bar(f"{problem}, {name}: of the plain rate", part, OF_PLAIN, "times", at_least=True)
