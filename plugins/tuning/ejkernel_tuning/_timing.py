"""The time of a function: from the device's profile if there is one, else by the clock, with the dispatch amortised."""

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

#: The shortest time of a sample by the clock. A sample of a short function is many calls.
SAMPLE_S = 1e-3
#: The fewest samples before measuring may stop early, which it does once the interval of their median is narrow.
MIN_SAMPLES = 8
#: An interval is narrow if half of it is less than this part of the median.
NARROW_INTERVAL = 0.02


#: JAX has one profiler for the process.
_profiler_lock = threading.Lock()
#: Set once a profile has had times of the device.
_has_device_times = threading.Event()


class Timing(float):
    """The median time of one call in milliseconds, with all samples."""

    samples: tuple[float, ...]
    #: "device" or "clock".
    source: str

    def __new__(cls, samples: Sequence[float], source: str) -> Timing:
        self = super().__new__(cls, statistics.median(samples))
        self.samples, self.source = tuple(samples), source
        return self

    @property
    def spread(self) -> float:
        """The distance between the quartiles, in milliseconds."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return high - low

    def __str__(self) -> str:
        how = f"quartiles {self.spread:.2g} apart, {len(self.samples)} samples by the {self.source}"
        return f"{float(self):.4g} ms ({how})"


def benchmark(fn: Callable[..., Any], *args: Any, num_warmup: int = 3, num_iters: int = 100) -> Timing:
    """The time of ``fn(*args)`` in milliseconds: a float with ``spread``, ``samples`` and their ``source``.

    At most ``num_iters`` samples are taken, and fewer once the median is known well. On a GPU, XLA's profile has the
    time of the device, without that of Python. Elsewhere, a sample is the time by the clock of as many calls in a row
    as fill a millisecond.
    ``fn`` may return any pytree. Work that its results do not depend on is not waited for.

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
        jax.block_until_ready(fn(*args))  # compilation is not measured
    if jax.default_backend() == "gpu":
        samples = on_device(fn, args, num_iters)
        if samples:
            return Timing(samples, "device")
    return Timing(by_clock(fn, args, num_iters), "clock")


def by_clock(fn: Callable[..., Any], args: Sequence[Any], calls: int, until: float = math.inf) -> list[float]:
    """Samples of one call in milliseconds, each over as many calls as fill ``SAMPLE_S``. There is at least one."""
    batch = batch_size(fn, args)
    samples: list[float] = []
    while len(samples) < calls and not _is_enough(samples, until):
        samples.append(seconds(fn, args, batch) * 1e3)
    return samples


def batch_size(fn: Callable[..., Any], args: Sequence[Any]) -> int:
    """The number of calls that fill ``SAMPLE_S``."""
    return max(1, math.ceil(SAMPLE_S / max(seconds(fn, args, 1), 1e-9)))


def _is_enough(samples: Sequence[float], until: float) -> bool:
    return bool(samples) and (time.monotonic() > until or (len(samples) >= MIN_SAMPLES and _is_narrow(samples)))


def seconds(fn: Callable[..., Any], args: Sequence[Any], calls: int) -> float:
    """The time of one call, averaged over this many calls in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        out = fn(*args)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls


def _is_narrow(samples: Sequence[float]) -> bool:
    """Whether the 95 % interval of the median, by order statistics, is narrow."""
    ordered, half = sorted(samples), math.sqrt(len(samples))
    low = max(0, math.floor(len(ordered) / 2 - half))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + half))
    return ordered[high] - ordered[low] <= 2 * NARROW_INTERVAL * statistics.median(ordered)


def on_device(fn: Callable[..., Any], args: Sequence[Any], calls: int, until: float = math.inf) -> list[float]:
    """Samples of one call in milliseconds, from the profile of the device; none where it never has times.

    Where earlier ones had, it raises: a time by the clock, which includes Python's, cannot be compared with them.
    """
    # Short runs first: a profile cannot be stopped early, and one long run would measure more than is needed.
    samples: list[float] = []
    while len(samples) < calls and not _is_enough(samples, until):
        new_samples = _profile(fn, args, min(max(MIN_SAMPLES, len(samples)), calls - len(samples)))
        if not new_samples:
            if _has_device_times.is_set():
                raise RuntimeError(
                    "the device's profile has no times any more: another profiler runs, or it has failed"
                )
            return []
        _has_device_times.set()
        samples += new_samples
    return samples


def _profile(fn: Callable[..., Any], args: Sequence[Any], calls: int) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="ejkernel-profile-") as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 0
        options.enable_hlo_proto = False  # it would write the text of every loaded program each time
        with _profiler_lock:
            try:
                jax.profiler.start_trace(folder, profiler_options=options)
            except RuntimeError:  # the program is being profiled already
                return []
            try:
                for _ in range(calls):
                    jax.block_until_ready(fn(*args))
            finally:
                jax.profiler.stop_trace()
        files = list(Path(folder).rglob("*.xplane.pb"))
        return _device_times(jax.profiler.ProfileData.from_file(str(files[0])), calls) if files else []


def _device_times(profile: Any, calls: int) -> list[float]:
    """The device time of each call, where all calls have equally many spans; else their mean."""
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
    spans_per_call = len(spans) // calls
    groups = (spans[i : i + spans_per_call] for i in range(0, len(spans), spans_per_call))
    return [sum(duration for _, duration in group) * 1e-6 for group in groups]
