"""How long a function takes: on the device where the device says so, else by the clock with the dispatch amortised."""

from __future__ import annotations

import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

#: A sample by the clock takes at least this long: many calls where one is short.
SAMPLE_S = 1e-3
#: Enough samples to stop early, once the interval around their median is narrow.
ENOUGH = 8
#: Half the interval over the median at which it is narrow.
NARROW = 0.02


#: JAX has one profiler.
_one_at_a_time = threading.Lock()


class Timing(float):
    """Milliseconds of one call: the median, with everything that was measured."""

    samples: tuple[float, ...]
    #: "device" or "clock".
    source: str

    def __new__(cls, samples: Sequence[float], source: str) -> Timing:
        self = super().__new__(cls, statistics.median(samples))
        self.samples, self.source = tuple(samples), source
        return self

    @property
    def spread(self) -> float:
        """The distance of the quartiles, in milliseconds."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return high - low

    def __str__(self) -> str:
        how = f"quartiles {self.spread:.2g} apart, {len(self.samples)} samples by the {self.source}"
        return f"{float(self):.4g} ms ({how})"


def benchmark(fn: Callable[..., Any], *args: Any, num_warmup: int = 3, num_iters: int = 100) -> Timing:
    """How long ``fn(*args)`` takes, in milliseconds: a float with ``spread``, ``samples`` and their ``source``.

    At most ``num_iters`` samples are taken, fewer once the median is known well. On a GPU the time is that of the
    device, from XLA's profile, so that Python never decides; elsewhere a sample is by the clock, over as many calls in
    a row as fill a millisecond.
    ``fn`` may return any pytree. What it returns has to be all that it does: other work is not waited for.

    >>> timing = benchmark(jax.numpy.sin, 1.0, num_warmup=1, num_iters=5)
    >>> timing > 0, 1 <= len(timing.samples) <= 5
    (True, True)
    """
    if num_iters < 1 or num_warmup < 0:
        raise ValueError(f"num_iters takes at least 1 and num_warmup at least 0; got {num_iters} and {num_warmup}")
    out = None
    for _ in range(num_warmup):
        out = fn(*args)
    jax.block_until_ready(out)
    if num_warmup == 0:
        jax.block_until_ready(fn(*args))  # compiling is no part of it
    if jax.default_backend() == "gpu":
        samples = on_device(fn, args, num_iters)
        if samples:
            return Timing(samples, "device")
    return Timing(by_clock(fn, args, num_iters), "clock")


def by_clock(fn: Callable[..., Any], args: Sequence[Any], calls: int, until: float = math.inf) -> list[float]:
    """Samples of one call in milliseconds, each over as many calls as fill ``SAMPLE_S``; one at least."""
    batch = batch_size(fn, args)
    samples: list[float] = []
    while len(samples) < calls and not _is_enough(samples, until):
        samples.append(seconds(fn, args, batch) * 1e3)
    return samples


def batch_size(fn: Callable[..., Any], args: Sequence[Any]) -> int:
    """How many calls fill ``SAMPLE_S``."""
    return max(1, math.ceil(SAMPLE_S / max(seconds(fn, args, 1), 1e-9)))


def _is_enough(samples: Sequence[float], until: float) -> bool:
    return bool(samples) and (time.monotonic() > until or (len(samples) >= ENOUGH and _is_narrow(samples)))


def seconds(fn: Callable[..., Any], args: Sequence[Any], calls: int) -> float:
    """What one of so many calls in a row takes."""
    start = time.perf_counter()
    for _ in range(calls):
        out = fn(*args)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls


def _is_narrow(samples: Sequence[float]) -> bool:
    """Whether the 95 % interval of the median, from the order of the samples, is narrow."""
    ordered, half = sorted(samples), math.sqrt(len(samples))
    low = max(0, math.floor(len(ordered) / 2 - half))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + half))
    return ordered[high] - ordered[low] <= 2 * NARROW * statistics.median(ordered)


def on_device(fn: Callable[..., Any], args: Sequence[Any], calls: int, until: float = math.inf) -> list[float]:
    """Samples of one call in milliseconds, from the profile of the device; none where it has nothing to tell."""
    # Short runs first: a profile cannot be stopped early, and one long run would measure more than is needed.
    samples: list[float] = []
    while len(samples) < calls and not _is_enough(samples, until):
        more = _profiled(fn, args, min(max(ENOUGH, len(samples)), calls - len(samples)))
        if not more:
            return []
        samples += more
    return samples


def _profiled(fn: Callable[..., Any], args: Sequence[Any], calls: int) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="ejkernel-profile-") as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 0
        options.enable_hlo_proto = False  # the texts of all programs that are loaded would be written every time
        with _one_at_a_time:
            try:
                jax.profiler.start_trace(folder, profiler_options=options)
            except RuntimeError:  # the program is being profiled: the clock has to do
                return []
            try:
                for _ in range(calls):
                    jax.block_until_ready(fn(*args))
            finally:
                jax.profiler.stop_trace()
        files = list(Path(folder).rglob("*.xplane.pb"))
        return _busy(jax.profiler.ProfileData.from_file(str(files[0])), calls) if files else []


def _busy(profile: Any, calls: int) -> list[float]:
    """The time that kernels took on the device, call by call, where every call left equally many of them."""
    spans = sorted(
        (event.start_ns, event.duration_ns)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    )
    if not spans:
        return []
    if len(spans) % calls:
        return [sum(duration for _, duration in spans) / calls * 1e-6]
    each = len(spans) // calls
    groups = (spans[i : i + each] for i in range(0, len(spans), each))
    return [sum(duration for _, duration in group) * 1e-6 for group in groups]
