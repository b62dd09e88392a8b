"""Times under sustained load: the device never waits, neither between calls nor between contenders.

A card at its power limit lowers its clock within a fraction of a second. What needs less energy is then faster. A few
calls after a pause still run at the highest clock, and do not show it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import jax

from ._clocks import Read
from ._peers import TorchArray
from ._timing import Times, in_orders

#: How long all contenders run in turn before anything is measured: at least, and at most while the clock still changes.
WARM_S, LONGEST_WARM_S = 1.0, 3.0
#: How long a contender runs before the next one.
QUEUE_S = 0.06
#: The fewest calls of a queue.
FEWEST = 3
#: So many calls of the next queue are there before the host waits for the end of this one. XLA takes 32 calls ahead,
#: and the call after them would wait for the device.
AHEAD = 8
#: A clock is steady if two passes over all contenders differ by less than this part.
STEADY = 0.02


@attrs.define(eq=False)
class Queue:
    """Calls of one contender, one after another."""

    run: Callable[[], Any]
    #: The number of calls.
    count: int = FEWEST
    #: Whether its work follows that of other contenders on the device: that of PyTorch is on a stream of its own, and
    #: would run beside them.
    is_in_order: bool = True

    def put(self, count: int, last: Any = None) -> Any:
        """Put calls into the queue of the device. Returns the results of the last one, which are ``last`` if none."""
        for _ in range(count):
            last = self.run()
        return last

    def can_follow(self, other: Queue) -> bool:
        """Whether it may begin before the host has seen the end of the other one. A contender that updates arrays would
        take away those that the host waits for, so that none follows itself.
        """
        return self.run is not other.run and self.is_in_order and other.is_in_order


def under_load(queues: Mapping[str, Queue], rounds: int) -> dict[str, Times]:
    """Time all contenders in turn, without a pause, right after ``warm``."""
    names = [name for order in in_orders(list(queues), rounds) for name in order]
    samples: dict[str, list[float]] = {name: [] for name in queues}
    # The first queue is not counted, because the device has waited for it.
    for name, seconds in zip(
        names, _in_turn([[*queues.values()][-1], *map(queues.__getitem__, names)])[1:], strict=True
    ):
        samples[name].append(seconds)
    return {name: Times(seconds) for name, seconds in samples.items()}


def warm(contenders: Mapping[str, Callable[[], Any]], read: Read = lambda: None) -> dict[str, Queue]:
    """Run all contenders in turn until the clock is steady, as ``read`` tells it.

    Returns each with as many calls as take ``QUEUE_S``.
    """
    queues = {name: Queue(run) for name, run in contenders.items()}
    for queue in queues.values():
        results = jax.block_until_ready(queue.run())
        queue.is_in_order = not any(isinstance(leaf, TorchArray) for leaf in jax.tree.leaves(results))
        del results  # it can be large
    start, before, is_steady = time.perf_counter(), math.nan, False
    while (spent := time.perf_counter() - start) < WARM_S or (not is_steady and spent < LONGEST_WARM_S):
        for queue, seconds in zip(queues.values(), _in_turn(list(queues.values())), strict=True):
            queue.count = max(FEWEST, math.ceil(QUEUE_S / seconds))
        reading = read()
        is_steady = reading is None or abs(reading.mhz - before) <= STEADY * before
        before = math.nan if reading is None else reading.mhz
    return queues


def _in_turn(queues: Sequence[Queue]) -> list[float]:
    """The seconds of a call in each queue: from the end of the queue before, by the host's clock."""
    seconds: list[float] = []
    waiting, last = 0, None
    end = time.perf_counter()
    for queue, following in zip(queues, [*queues[1:], None], strict=True):
        last = queue.put(queue.count - waiting, last)
        waiting, first_of_following = 0, None
        if following is not None and following.can_follow(queue):
            waiting = min(AHEAD, following.count)
            first_of_following = following.put(waiting)
        jax.block_until_ready(last)
        start, end = end, time.perf_counter()
        seconds.append((end - start) / queue.count)
        last = first_of_following
    return seconds


def host_seconds(run: Callable[[], Any]) -> float:
    """The time of a call without that of the device: that of putting it into the queue."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    for _ in range(AHEAD):
        last = run()
    seconds = (time.perf_counter() - start) / AHEAD
    jax.block_until_ready(last)
    return seconds
