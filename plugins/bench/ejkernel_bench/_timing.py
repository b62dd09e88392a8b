"""Times of several contenders, measured in turn: medians and spreads."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import jax

from ejkernel_tuning import Timing, benchmark


@attrs.frozen
class Times:
    """Seconds, one for each round."""

    seconds: tuple[float, ...] = attrs.field(converter=tuple[float, ...], validator=attrs.validators.min_len(1))

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def percentile(self, percent: float) -> float:
        """The value below which ``percent`` of the rounds are, interpolated.

        >>> Times([4.0, 1.0, 3.0, 2.0, 5.0]).percentile(50), Times([1.0, 2.0]).percentile(25)
        (3.0, 1.25)
        """
        ordered = sorted(self.seconds)
        place = (len(ordered) - 1) * percent / 100
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (place - below)

    def scaled(self, unit: float) -> tuple[float, float, float, float]:
        """Median, spread, least and greatest, in units of so many seconds."""
        return self.median / unit, self.spread / unit, min(self.seconds) / unit, max(self.seconds) / unit

    @property
    def spread(self) -> float:
        """The distance between the quartiles. It is large where the machine is busy with other things."""
        return self.percentile(75) - self.percentile(25)


#: The headings of ``Times.scaled``.
COLUMNS = ("median", "quartile range", "least", "greatest")


def once(run: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds until the results of one run are ready, and the results."""
    start = time.perf_counter()
    results = jax.block_until_ready(run())
    return time.perf_counter() - start, results


def interleaved(contenders: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1) -> dict[str, Times]:
    """Time all contenders in every round, in alternating order.

    What slows the machine down for a while then slows all of them, and no contender always follows the same one.
    """
    for _ in range(warm_up):
        for run in contenders.values():
            jax.block_until_ready(run())
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    with _no_garbage_collection():
        for order in in_orders(list(contenders), rounds):
            for name in order:
                samples[name].append(once(contenders[name])[0])
    return {name: Times(seconds) for name, seconds in samples.items()}


def in_bursts(contenders: Mapping[str, Callable[[], Any]], rounds: int, seconds: float) -> dict[str, Times]:
    """The same for a device that runs asynchronously: a round has as many calls as take ``seconds``.

    The device never waits for Python between them. The first round is for warming up and for counting these calls.
    """
    counts = dict.fromkeys(contenders, 3)
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for number, order in enumerate(in_orders(list(contenders), rounds + 1)):
        for name in order:
            jax.block_until_ready(contenders[name]())  # so that its code and inputs are in the caches again
            burst, _ = once(partial(_last, contenders[name], counts[name]))
            if number == 0:
                counts[name] = max(3, math.ceil(seconds * counts[name] / burst))
            else:
                samples[name].append(burst / counts[name])
    return {name: Times(seconds) for name, seconds in samples.items()}


def on_the_device(contenders: Mapping[str, Callable[[], Any]], rounds: int, warm_s: float = 0.0) -> dict[str, Times]:
    """The same by the device's own clock where it has one, for calls that take Python longer than the device. A round
    is some calls, after ``warm_s`` of the same work. The time between the kernels of a call does not count.
    """
    timings: dict[str, list[Timing]] = {name: [] for name in contenders}
    for order in in_orders(list(contenders), rounds):
        for name in order:
            _keep_busy(contenders[name], warm_s)
            timings[name].append(benchmark(contenders[name], num_warmup=1, num_iters=8))
    if len({timing.source for row in timings.values() for timing in row}) > 1:
        raise MixedClocks("some were timed by the device and some by the host; is the program being profiled?")
    return {name: Times([timing * 1e-3 for timing in row]) for name, row in timings.items()}


class MixedClocks(RuntimeError):
    """Times by the device and by the host cannot be compared."""


def _last(run: Callable[[], Any], count: int) -> Any:
    for _ in range(count - 1):
        run()
    return run()


def _keep_busy(run: Callable[[], Any], seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        jax.block_until_ready(_last(run, 4))


def in_orders(names: Sequence[str], rounds: int) -> Iterator[Sequence[str]]:
    """The names in the order of each round: forwards and backwards in turn."""
    for number in range(rounds):
        yield names if number % 2 == 0 else names[::-1]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
