"""The time of a call under load: in a queue that follows others, so that the device never waits.

A card at its power limit lowers its clock, and of two kernels, the one that needs less energy is then faster. A call
after a pause runs at the highest clock. So bursts may rank kernels in another order than a program that keeps the card
busy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ._in_place import InPlace

#: Shorter calls are timed by the device's own clock: the host may take as long to start one.
SHORTEST_MS = 0.1
#: So are calls whose start takes more than this part of their time.
HOST_SHARE = 0.8
#: How long all variants run in turn before the first sample, and the largest share of the remaining time for that.
WARM_S, WARM_SHARE = 1.0, 0.1
#: The shortest queue. The last rounds, in which few variants are left, have longer ones, by their share of the calls.
QUEUE_S, QUEUE_S_OF_ALL = 0.02, 0.12
#: The part of a queue that runs before what is timed, because the device has waited for the thread.
LEAD = 0.5
#: So many of the timed calls are in the queue before the host waits for the end of the others. XLA takes 32 ahead.
AHEAD = 8


def is_possible(platform: str) -> bool:
    """Whether the device runs calls while the host puts others into its queue."""
    return platform == "gpu"


def queue_s(share: float) -> float:
    """The length of the queues in a round with this share of the calls."""
    return max(QUEUE_S, QUEUE_S_OF_ALL * share)


def calls_of(milliseconds: float, seconds: float) -> tuple[int, int]:
    """The calls of this length that lead, and those that are timed.

    >>> calls_of(milliseconds=1.0, seconds=0.02), calls_of(milliseconds=50.0, seconds=0.02)
    ((10, 20), (1, 1))
    """
    calls = seconds * 1e3 / milliseconds
    return max(1, math.ceil(LEAD * calls)), max(1, math.ceil(calls))


def sample(fn: Callable[..., Any], args: Sequence[Any], milliseconds: float, seconds: float) -> list[float]:
    """The milliseconds of a call, which takes about so many, in a queue of so many seconds. None where the host cannot
    start the calls fast enough.
    """
    lead, calls = calls_of(milliseconds, seconds)
    # A kernel that updates its arguments takes away the results that the host would wait for.
    ahead = 0 if isinstance(fn, InPlace) else min(AHEAD, calls)
    start, first_calls = time.perf_counter(), min(lead, AHEAD)
    last = _put(fn, args, first_calls)
    host_ms = (time.perf_counter() - start) * 1e3 / first_calls
    last = _put(fn, args, lead - first_calls, last)
    timed = _put(fn, args, ahead)
    jax.block_until_ready(last)
    start = time.perf_counter()
    jax.block_until_ready(_put(fn, args, calls - ahead, timed))
    end = time.perf_counter()
    return [] if host_ms > HOST_SHARE * milliseconds else [(end - start) * 1e3 / calls]


def _put(fn: Callable[..., Any], args: Sequence[Any], calls: int, last: Any = None) -> Any:
    """Put calls into the queue of the device. Returns the results of the last one."""
    for _ in range(calls):
        last = fn(*args)
    return last
