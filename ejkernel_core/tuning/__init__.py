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
from ._result import Entry, Tuned, TuningResult
from ._timing import Timing, benchmark
from ._tuner import TUNER, Earlier, Tuner

__all__ = [
    "TUNER",
    "Earlier",
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
    "record_invocation",
    "recording",
    "tune",
]
