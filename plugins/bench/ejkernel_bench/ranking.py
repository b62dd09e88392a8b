"""What tuning chooses under load and in bursts, and how often the two differ.

A configuration that wins in bursts, which are a few calls after a pause, may need more energy than another one. It is
then the slower one in a program that keeps the card busy. Each call is measured in both ways, by one tuner in one run.
Calls that are too short for a measurement under load have one ranking, and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax

from ejkernel_core import Example, Invocation
from ejkernel_core.extend import config_text
from ejkernel_ops.flash_attention.sizes import COMMON, self_attention
from ejkernel_ops.grouped_matmul.examples import layer_call
from ejkernel_ops.grouped_matmul.sizes import PEERS
from ejkernel_ops.rms_norm.examples import large
from ejkernel_tuning import Entry, Tuned
from ejkernel_tuning._calls import passes_of, tune_each

from ._calls import describe
from ._report import Report
from ._rows import Rows
from ._stores import temporary_store

#: With their backward passes, a dozen calls.
EXAMPLES = (
    COMMON[0],
    COMMON[4],
    self_attention(1, 16384, 16, 128, "bfloat16", window=1023),
    self_attention(1, 8192, 16, 256, "bfloat16"),
    layer_call(PEERS[0]),
    large("rms_norm", 65536, 4096, uses=()),
)
BUDGET_S = 30.0
COLUMNS = ("", "under load", "ms", "in bursts", "ms under load", "costs", "ms in a burst", "measured", "seconds")
SERIES = ("ms", "ms under load", "costs")


def run(backend: str | None = None) -> Report:
    """On a GPU, for all backends or this one."""
    if jax.default_backend() != "gpu":
        return Report("ranking", (), text="ranking: there is no GPU here, and nothing was measured")
    return compare(invocations(EXAMPLES), backend, BUDGET_S)


def invocations(examples: Iterable[Example]) -> dict[str, Invocation]:
    """Both passes of each example, by their names."""
    passes = ((example, inv) for example in examples for inv in passes_of(example.op, describe(example)))
    return {f"{inv.op}, {example.name}": inv for example, inv in passes}


def compare(calls: Mapping[str, Invocation], backend: str | None, budget_s: float) -> Report:
    """One row for each call that has both rankings."""
    rows = Rows("the fastest configurations, milliseconds", COLUMNS, series=SERIES)
    measured: list[Tuned] = []
    short: list[str] = []
    faults: list[str] = []
    with temporary_store():
        outcomes = tune_each(calls.values(), budget_s, False, True, backend, has_burst_ranking=True)
        for name, outcome in zip(calls, outcomes, strict=True):
            tuned = outcome.tuned
            if tuned is None or tuned.best is None:
                faults.append(f"{name}: {outcome.reason or 'nothing could be measured'}")
            elif not tuned.burst_ranking:
                short.append(name)
            else:
                measured.append(tuned)
                rows.add(*_row(name, tuned))
    return Report("ranking", [rows.table()], (), faults, _summary(measured, short))


def cost_of_bursts(tuned: Tuned) -> float | None:
    """The time under load of what wins in bursts, relative to what wins under load; None where they are the same."""
    assert tuned.best is not None
    other = _under_load(tuned)
    if other is tuned.best:
        return None
    assert tuned.best.milliseconds is not None
    assert other.milliseconds is not None
    return other.milliseconds / tuned.best.milliseconds


def _under_load(tuned: Tuned) -> Entry:
    """What wins in bursts, as it was measured under load."""
    winner = tuned.burst_ranking[0]
    return next(entry for entry in tuned.entries if (entry.backend, entry.cfg) == (winner.backend, winner.cfg))


def _row(name: str, tuned: Tuned) -> Iterator[str | float]:
    assert tuned.best is not None
    in_bursts, cost = tuned.burst_ranking[0], cost_of_bursts(tuned)
    yield name
    yield _name(tuned.best)
    yield tuned.best.milliseconds or "-"
    yield "the same" if cost is None else _name(in_bursts)
    yield "-" if cost is None else _under_load(tuned).milliseconds or "-"
    yield "-" if cost is None else cost
    yield in_bursts.milliseconds or "-"
    yield len(tuned.burst_ranking)
    yield tuned.seconds


def _name(entry: Entry) -> str:
    return f"{entry.backend} {config_text(entry.cfg)}"


def _summary(measured: Sequence[Tuned], short: Sequence[str]) -> str:
    costs = [cost for cost in map(cost_of_bursts, measured) if cost is not None]
    text = f"ranking: the winner differs in {len(costs)} of {len(measured)} calls"
    if costs:
        text += f"; under load, that of bursts takes up to {max(costs):.3g} times as long"
    return text + (f"; too short for load: {', '.join(short)}" if short else "")
