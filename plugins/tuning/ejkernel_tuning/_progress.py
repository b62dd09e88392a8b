"""The progress of a measurement, for stores, terminals, notebooks and the log."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import attrs

from ejkernel_core import Invocation
from ejkernel_core.extend import Entry, Progress

logger = logging.getLogger("ejkernel.tuning")
#: The shortest time between two lines of the log.
LOG_S = 1.0

Display = Callable[[Progress], None]
_display: ContextVar[Display | None] = ContextVar("display of the progress", default=None)


@contextlib.contextmanager
def shown_by(display: Display) -> Iterator[None]:
    """Have this function show the progress of all measurements that begin in the ``with`` block. Several threads call
    it, one at a time.
    """
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)


class Announcer:
    """Reports the progress of one measurement to the stores, and shows it on a terminal or in the log."""

    def __init__(self, report: Callable[[Progress], Any], inv: Invocation, budget_s: float) -> None:
        self._report, self._inv, self._budget_s = report, inv, budget_s
        self._is_finished, self._last_log = False, -math.inf
        self._display = _display.get()  # other threads, which have their own context, report too

    def __call__(self, progress: Progress) -> None:
        self._report(progress)
        self._show(progress)

    def finish(self, entries: tuple[Entry, ...] = (), seconds: float = 0.0) -> None:
        """Report the end, once."""
        if not self._is_finished:
            self._is_finished = True
            last = Progress(self._inv, entries, seconds, self._budget_s)
            if entries:
                self._report(last)
            self._show(attrs.evolve(last, finished=True))

    def _show(self, progress: Progress) -> None:
        if self._display is not None:
            self._display(progress)
        elif not show(progress, sys.stderr):
            self._log(progress)

    def _log(self, progress: Progress) -> None:
        now = time.monotonic()
        if logger.isEnabledFor(logging.INFO) and (progress.finished or now - self._last_log >= LOG_S):
            self._last_log = now
            logger.info("%s", progress)


def show(progress: Progress, stream: Any) -> bool:
    """Show the progress in a notebook or on a terminal. False where ``stream`` is neither."""
    width = shutil.get_terminal_size((120, 24)).columns - 1
    line, end = str(progress)[:width], "\n" if progress.finished else ""
    if _is_notebook():
        # A notebook supports the carriage return, but cannot erase a line.
        stream, text = sys.stdout, f"\r{line:<{width}}{end}"
    elif stream is not None and stream.isatty():
        text = f"\r\x1b[2K{line}{end}"
    else:
        return False
    stream.write(text)
    stream.flush()
    return True


def _is_notebook() -> bool:
    if "ipykernel" not in sys.modules:
        return False
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return getattr(get_ipython(), "kernel", None) is not None
