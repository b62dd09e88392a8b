"""Tuning: measure a function, a call, or all calls of a program."""

from __future__ import annotations

from ejkernel_core._measurement import Earlier, Entry, Progress, Trial
from ejkernel_core._records import DIED

from ._autotune import tune
from ._calls import (
    Recorder,
    autotune,
    autotune_recorded,
    clear_invocations,
    get_invocations,
    record_invocation,
    recording,
)
from ._labels import Label, extract_labels_from_hlo_text, find_labels_in_lowered, label, labels_to_configs
from ._result import Tuned, TuningResult
from ._timing import Timing, benchmark
from ._usage import Elapsed, get_memory_usage, timer

__all__ = [
    "DIED",
    "Earlier",
    "Elapsed",
    "Entry",
    "Label",
    "Progress",
    "Recorder",
    "Timing",
    "Trial",
    "Tuned",
    "TuningResult",
    "autotune",
    "autotune_recorded",
    "benchmark",
    "clear_invocations",
    "extract_labels_from_hlo_text",
    "find_labels_in_lowered",
    "get_invocations",
    "get_memory_usage",
    "label",
    "labels_to_configs",
    "record_invocation",
    "recording",
    "timer",
    "tune",
]
