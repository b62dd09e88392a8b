"""The figures of contenders as users run them: under sustained load, or by the device's clock where calls are short."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs
import jax

from ._clocks import Reading, reader, summary, watched
from ._load import host_seconds, under_load, warm
from ._report import Cell
from ._timing import MixedClocks, Times, in_bursts, on_the_device

#: A call that takes less than this is timed by the device's clock, for the host may take as long to start it.
SHORT_S = 1e-4
#: So is one whose start takes more than this part of its time.
HOST_SHARE = 0.8
#: A burst is shown where it differs from the sustained figure by more than this part.
BURST_DIFFERENCE = 0.03
#: Where neither clock nor profile of the device can be used: how long a contender runs in a round.
SECONDS = 0.02
#: How long a short call runs before each of its timings.
SHORT_WARM_S = 0.03

Contenders = Mapping[str, Callable[[], Any]]


@attrs.frozen(eq=False)
class Figures:
    """The times of contenders, and how the device ran meanwhile."""

    #: By contender.
    times: Mapping[str, Times]
    #: Under load only: by contender, a few calls after a pause, by the device's clock.
    bursts: Mapping[str, Times] = attrs.field(factory=dict)
    #: Medians while the times were taken; None where nothing reads them.
    clock: Reading | None = None

    def beside(self, unit: float = 1e-3) -> dict[str, Cell]:
        """The columns that a report shows beside the times, where there is something to show."""
        cells: dict[str, Cell] = {}
        if self.clock is not None:
            cells = {"MHz": round(self.clock.mhz), "W": round(self.clock.watts)}
            cells |= {"limited by": ", ".join(self.clock.limits)} if self.clock.limits else {}
        for name, burst in self.bursts.items():
            if abs(burst.median / self.times[name].median - 1) > BURST_DIFFERENCE:
                cells[f"{name} burst"] = burst.median / unit
        return cells


def figures_of(contenders: Contenders, rounds: int, aside: Collection[str] = ()) -> Figures:
    """Time contenders on a GPU as users run them, and elsewhere as ``on_the_device`` does.

    All of them are timed in the same way: under load if every call is long enough. Those ``aside`` do not decide that.
    """
    try:
        if jax.default_backend() != "gpu":
            return Figures(on_the_device(contenders, rounds))
        bursts = on_the_device(contenders, 1)
    except MixedClocks:
        return Figures(in_bursts(contenders, rounds, SECONDS))
    deciding = [name for name in contenders if name not in aside]
    if any(_is_short(contenders[name], bursts[name].median) for name in deciding):
        return _of_short_calls(contenders, rounds)
    queues = warm(contenders, reader())
    with watched() as readings:
        times = under_load(queues, rounds)
    return Figures(times, bursts, summary(readings))


def _is_short(run: Callable[[], Any], seconds: float) -> bool:
    return seconds < SHORT_S or host_seconds(run) > HOST_SHARE * seconds


def _of_short_calls(contenders: Contenders, rounds: int) -> Figures:
    """The clock is that of the work before, because a profile has long pauses."""
    with watched() as readings:
        warm(contenders, reader())
    return Figures(on_the_device(contenders, rounds, warm_s=SHORT_WARM_S), clock=summary(readings))
