"""What an engine does with requests, and when each token is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import jax
import numpy as np

from ._rows import announce
from ._serve_load import Load
from .serving import Decoder, Engine, Limits, decoder

Attention = Callable[..., jax.Array]


@attrs.define(eq=False)
class Served:
    """What an engine has done."""

    prompts: Sequence[int]
    arrivals: Sequence[float]
    #: Of each request, and the seconds at which each token was there.
    tokens: list[list[int]]
    times: list[list[float]]
    seconds: float = 0.0
    ended: int = 0
    errors: list[str] = attrs.field(factory=list)
    preemptions: int = 0
    programs: int = 0
    compile_seconds: float = 0.0

    @property
    def speed(self) -> float:
        """New tokens in a second."""
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def whole_speed(self) -> float:
        """With those of the prompts that were read."""
        read = sum(length for length, tokens in zip(self.prompts, self.tokens, strict=True) if tokens)
        return self.speed + read / self.seconds

    @property
    def to_first(self) -> np.ndarray:
        """Of each request that has a token, the seconds until it had one."""
        pairs = zip(self.times, self.arrivals, strict=True)
        return np.array([times[0] - arrival for times, arrival in pairs if times])

    @property
    def between(self) -> np.ndarray:
        """The seconds between each token and the next one of its request."""
        return np.concatenate([np.zeros(0), *map(np.diff, self.times)])


def speed_up(ours: Served, others: Served) -> float | None:
    """How much sooner ours has as many new tokens as both have; None where one has none."""
    mine, theirs = (sorted(time for times in served.times for time in times) for served in (ours, others))
    count = min(len(mine), len(theirs))
    return theirs[count - 1] / mine[count - 1] if count else None


def answered(
    engine_type: type[Engine],
    attention: Attention,
    sizes: Decoder,
    params: Any,
    limits: Limits,
    load: Load,
    seconds: float | None = None,
) -> Served:
    """What a new engine does with the requests, in at most so many seconds."""
    cache = sizes.cache(limits.pages, limits.page_size)
    engine = engine_type(decoder(sizes, attention), params, cache, limits)
    served = Served(
        [len(request.prompt) for request in load.requests],
        load.arrivals,
        [[] for _ in load.requests],
        [[] for _ in load.requests],
    )
    announce(f"serve: {len(load.requests)} requests")
    arrived, begin = 0, time.perf_counter()
    while (arrived < len(load.requests) or not engine.is_idle) and (seconds is None or served.seconds < seconds):
        while arrived < len(load.requests) and load.arrivals[arrived] <= time.perf_counter() - begin:
            engine.add(load.requests[arrived])
            arrived += 1
        if engine.is_idle:  # nothing to do until the next one arrives
            time.sleep(max(0.0, load.arrivals[arrived] - (time.perf_counter() - begin)))
        outputs = engine.step()
        served.seconds = time.perf_counter() - begin
        for number, token, finish, error in outputs:
            if token is not None:
                served.tokens[number].append(token)
                served.times[number].append(served.seconds)
            served.ended += finish is not None
            served.errors += [f"request {number}: {error}"] if error else []
    served.preemptions, served.compile_seconds = engine.scheduler.preemptions, engine.compile_seconds
    programs: Any = (engine._step, engine._copy)
    served.programs = sum(program._cache_size() for program in programs)
    return served
