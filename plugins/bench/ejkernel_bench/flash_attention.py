"""``flash_attention`` on a GPU, case by case, against everybody who can do the case, in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

import attrs
import jax

from ._contenders import PASSES, Pass, Results, compiled, disagreement
from ._errors import TOLERANCE
from ._peers import Peer, peers
from ._problem import Problem, through_core
from ._report import Bar, Cell, Report, Table
from ._timing import Times, in_bursts

BF16 = "bfloat16"
#: Seven cases, and the most TFLOP/s that a plain Triton kernel had on an H200, forward and both passes.
ANCHORS: dict[Problem, tuple[float, float]] = {
    Problem(4, 4096, 16, 128, BF16, causal=False): (334, 318),
    Problem(4, 4096, 16, 128, BF16): (294, 260),
    Problem(1, 16384, 16, 128, BF16, causal=False): (348, 317),
    Problem(1, 16384, 16, 128, BF16): (347, 292),
    Problem(4, 4096, 32, 64, BF16): (283, 220),
    Problem(2, 8192, 32, 128, BF16, kv_heads=8): (338, 283),
    Problem(8, 2048, 16, 128, BF16): (269, 235),
}
LONG = Problem(1, 16384, 16, 128, BF16)
MORE = (
    *(Problem(1, 8192, 16, dim, BF16) for dim in (64, 96, 128, 192, 256)),
    attrs.evolve(LONG, window=1023),
    attrs.evolve(LONG, sequences=8),
    attrs.evolve(LONG, sequences=64),
    Problem(1, 8192, 16, 128, BF16, soft_cap=30.0),
    Problem(1, 8192, 16, 128, BF16, bias=True),
    Problem(1, 8192, 16, 128, BF16, sinks=True),
)
#: How much faster than the best plain Triton peer; how much faster a window of 1024 is than none.
FORWARD, BOTH, WINDOWED, OVER_XLA = 1.25, 1.20, 6.0, 2.5
#: Peers whose times are also told as multiples of ours.
COMPARED = ("cuDNN", "jax pallas-triton", "torch FA2")
ROUNDS = 7
#: A round runs a contender for about so long, without waiting in between.
SECONDS = 0.03


def run(backend: str | None = None, rounds: int = ROUNDS, against: bool = False) -> Report:
    """On a GPU; ``against`` peers, or alone."""
    if jax.default_backend() != "gpu":
        return Report("flash_attention", (), text="flash_attention: there is no GPU here, and nothing was measured")
    return compare([*ANCHORS, *MORE], backend, rounds, peers() if against else ())


def compare(problems: Sequence[Problem], backend: str | None, rounds: int, others: Sequence[Peer]) -> Report:
    """One row a problem and pass: our time and rate, and everybody else's time."""
    rows: list[tuple[Cell, ...]] = []
    wrong: list[str] = []
    rates: dict[tuple[Problem, str], tuple[float, Mapping[str, Times]]] = {}
    ours = f"ejkernel {backend}" if backend else "ejkernel"
    for problem in problems:
        arrays = problem.arrays()
        right = exact(problem, arrays)()
        for name in PASSES:
            runs = {ours: compiled(through_core(problem, backend), name, arrays, problem.extras())}
            runs |= {peer.name: run for peer in others if (run := peer.prepared(problem, arrays, name)) is not None}
            runs, refused = able(runs, problem, name, right)
            wrong += refused
            if ours not in runs:
                continue
            times = in_bursts(runs, rounds, SECONDS)
            rate = problem.flops(name) / times[ours].median / 1e12
            rates[problem, name] = rate, times
            rows.append((f"{problem}, {name}", *times[ours].scaled(1e-3)[:2], rate, *_peers_cells(times, ours, others)))
    compared = [f"{peer.name} / ours" for peer in others if peer.name in COMPARED]
    columns = ("", ours, "range", "TFLOP/s", *(peer.name for peer in others), *compared)
    table = Table(f"milliseconds, medians of {rounds} rounds in turn, bfloat16", columns, rows)
    return Report("flash_attention", [table], list(_bars(rates)), wrong)


def exact(problem: Problem, arrays: tuple[jax.Array, ...]) -> Pass:
    """Both passes by the blockwise XLA kernel, in float32."""
    wide = attrs.evolve(problem, dtype="float32")
    floats = tuple(array.astype("float32") for array in arrays)
    return compiled(through_core(wide, "xla"), "forward+backward", floats, wide.extras())


def able(
    runs: Mapping[str, Callable[[], Results]], problem: Problem, name: str, right: Results
) -> tuple[dict[str, Callable[[], Results]], list[str]]:
    """Who runs at all, and what is wrong with the results of those who do."""
    able, wrong = {}, []
    for who, run in runs.items():
        try:
            given = jax.block_until_ready(run())
        except Exception as fault:  # whatever it is, it is told, and the others are measured
            wrong.append(f"{who}, {name}, {problem}: {type(fault).__name__}: {str(fault)[:200]}")
            continue
        off = list(disagreement(f"{who}, {name}, {problem}", given, right, TOLERANCE[problem.dtype]))
        wrong += off
        if not off:
            able[who] = run
    return able, wrong


def _peers_cells(times: Mapping[str, Times], ours: str, others: Sequence[Peer]) -> Iterator[Cell]:
    for peer in others:
        yield times[peer.name].scaled(1e-3)[0] if peer.name in times else "-"
    for peer in others:
        if peer.name in COMPARED:
            yield times[peer.name].median / times[ours].median if peer.name in times else "-"


def _bars(rates: Mapping[tuple[Problem, str], tuple[float, Mapping[str, Times]]]) -> Iterator[Bar]:
    for problem, anchors in ANCHORS.items():
        for name, factor, anchor in zip(PASSES, (FORWARD, BOTH), anchors, strict=True):
            if (problem, name) in rates:
                what = f"{problem}, {name}: over the best plain Triton peer so far"
                yield Bar(what, rates[problem, name][0] / anchor, factor, "times", at_least=True)
    windowed = attrs.evolve(LONG, window=1023)
    for name in PASSES:
        if (windowed, name) in rates and (LONG, name) in rates:
            gain = _ours(rates[LONG, name][1]) / _ours(rates[windowed, name][1])
            yield Bar(f"{windowed}, {name}: none / window", gain, WINDOWED, "times", at_least=True)
    for (problem, name), (_, times) in rates.items():
        if "ejkernel xla" in times and len(times) > 1:
            gain = times["ejkernel xla"].median / _ours(times)
            yield Bar(f"{problem}, {name}: over the XLA kernel", gain, OVER_XLA, "times", at_least=True)


def _ours(times: Mapping[str, Times]) -> float:
    return median(next(iter(times.values())).seconds)
