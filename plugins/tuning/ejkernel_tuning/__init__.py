"""Tuning: measure a function, a call, or all calls of a program.

A name is imported when it is used, so that the command ``ejkernel tune`` starts without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ejkernel_core.extend import Earlier, Entry, Progress, Reason, Trial

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
    from ._saved import load_invocations, save_invocations
    from ._timing import Timing, benchmark
    from ._usage import Elapsed, get_memory_usage, timer

__all__ = [
    "Earlier",
    "Elapsed",
    "Entry",
    "Label",
    "Progress",
    "Reason",
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
    "load_invocations",
    "record_invocation",
    "recording",
    "save_invocations",
    "timer",
    "tune",
]

#: The names of each module, as above.
_NAMES = {
    "ejkernel_core.extend": ("Earlier", "Entry", "Progress", "Reason", "Trial"),
    "ejkernel_tuning._autotune": ("tune",),
    "ejkernel_tuning._calls": (
        "Recorder",
        "autotune",
        "autotune_recorded",
        "clear_invocations",
        "get_invocations",
        "record_invocation",
        "recording",
    ),
    "ejkernel_tuning._labels": (
        "Label",
        "extract_labels_from_hlo_text",
        "find_labels_in_lowered",
        "label",
        "labels_to_configs",
    ),
    "ejkernel_tuning._result": ("Tuned", "TuningResult"),
    "ejkernel_tuning._saved": ("load_invocations", "save_invocations"),
    "ejkernel_tuning._timing": ("Timing", "benchmark"),
    "ejkernel_tuning._usage": ("Elapsed", "get_memory_usage", "timer"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
