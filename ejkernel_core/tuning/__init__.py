"""Measuring: one function, one call, or all that a program calls."""

from __future__ import annotations

from ._autotune import Progress, tune
from ._calls import (
    Recorder,
    autotune,
    autotune_recorded,
    clear_invocations,
    get_invocations,
    record_invocation,
    recording,
)
from ._measuring import Elapsed, get_memory_usage, timer
from ._result import Entry, Tuned, TuningResult
from ._timing import Timing, benchmark
from ._tuner import TUNER, Earlier, Tuner

__all__ = [
    "TUNER",
    "Earlier",
    "Elapsed",
    "Entry",
    "Progress",
    "Recorder",
    "Timing",
    "Tuned",
    "Tuner",
    "TuningResult",
    "autotune",
    "autotune_recorded",
    "benchmark",
    "clear_invocations",
    "get_invocations",
    "get_memory_usage",
    "record_invocation",
    "recording",
    "timer",
    "tune",
]
