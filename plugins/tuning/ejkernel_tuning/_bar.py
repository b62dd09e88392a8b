"""The progress of several measurements: two lines that are rewritten on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

import attrs

from ejkernel_cli import config_text
from ejkernel_core import Invocation
from ejkernel_core.extend import Entry, Progress, Trial

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

#: The time between two lines where there is no terminal.
LINE_S = 10.0


@attrs.define(eq=False)
class Bar:
    """What is measured now: how many configurations of how many, the best so far, and the time left."""

    print_line: Callable[[str], None]
    budget_s: float
    #: Where progress goes if there is no terminal.
    stream: TextIO
    #: None where there is no terminal.
    console: Console | None = None
    #: The number of the call, and the count of all.
    number: int = 0
    count: int = 0
    inv: Invocation | None = None
    _progress: Progress | None = None
    _time: float = 0.0
    _line_time: float = 0.0

    def start(self, number: int, count: int, inv: Invocation) -> None:
        """Show the next call."""
        self.number, self.count, self.inv, self._progress = number, count, inv, None
        self._time = self._line_time = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        """Show the progress of the call."""
        now = time.monotonic()
        if self._progress is None and self.console is None:
            self._write(f"measuring {self._title}: {progress.inv}, at most {self.budget_s:g} s")
        if progress.entries or not progress.finished:  # the last one may say nothing more than that it is the last
            self._progress, self._time = progress, now
        if self.console is None and now - self._line_time >= LINE_S:
            self._line_time = now
            self._write(f"{self._title}: {'; '.join(filter(None, [self._counts, self._details, self._time_left]))}")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads it
            self.stream.write(f"{text}\n")
            self.stream.flush()

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        progress = self._progress
        if progress is None:
            return Text(f"{self._title}: making inputs" if self.inv else "looking at the calls", no_wrap=True)
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1, min_width=4)
        line.add_column(no_wrap=True)
        line.add_column(no_wrap=True)
        bar = ProgressBar(len(progress.entries) or 1, sum(map(_is_done, progress.entries)))
        line.add_row(self._title, bar, self._counts, self._time_left)
        return Group(line, Text(f"  {self._details}", no_wrap=True, overflow="ellipsis"))

    @property
    def _title(self) -> str:
        assert self.inv is not None
        return f"{self.number}/{self.count} {self.inv.op}" if self.count > 1 else self.inv.op

    @property
    def _counts(self) -> str:
        entries = self._progress.entries if self._progress else ()
        return f"{sum(map(_is_done, entries))} of {len(entries)}"

    @property
    def _time_left(self) -> str:
        """The time until the budget of this call is spent, and those of all later calls."""
        spent_s = self._progress.seconds + time.monotonic() - self._time if self._progress else 0.0
        seconds = round(max(0.0, self.budget_s - spent_s) + self.budget_s * (self.count - self.number))
        return f"at most {seconds // 60}:{seconds % 60:02} left in all"

    @property
    def _details(self) -> str:
        if self._progress is None:
            return ""
        measured = [entry for entry in self._progress.entries if entry.milliseconds is not None]
        best = min(measured, key=lambda entry: entry.milliseconds or 0.0, default=None)
        best_text = "" if best is None else f"best {best.milliseconds:.4g} ms by {best.backend}"
        return "; ".join(filter(None, [best_text, *map(_trial_text, self._progress.trials[-1:])]))


def _trial_text(trial: Trial) -> str:
    return f"{trial.step} {kernel_text(trial.backend, trial.cfg)}"


def kernel_text(backend: str, cfg: Any) -> str:
    """A backend with its configuration.

    >>> kernel_text("xla", attrs.make_class("Config", ["rows", "stages"])(2, None)), kernel_text("xla", None)
    ('xla (rows=2, stages=None)', 'xla')
    """
    return f"{backend} ({text})" if (text := config_text(cfg)) else backend


def _is_done(entry: Entry) -> bool:
    return entry.is_reached or bool(entry.reason)


@contextlib.contextmanager
def bar(budget_s: float, is_output_json: bool) -> Iterator[Bar]:
    """Show a bar for a ``with`` block: on the output, or on the error stream where the output is a pipe or JSON."""
    from rich.console import Console
    from rich.live import Live

    stream = sys.stderr if is_output_json or not sys.stdout.isatty() else sys.stdout
    console = Console(file=stream, highlight=False, markup=False)
    lines = sys.stderr if is_output_json else sys.stdout

    def print_line(text: str) -> None:
        if stream is lines and is_live:
            console.print(text, soft_wrap=True)
        else:
            lines.write(f"{text}\n")
            lines.flush()

    is_live = console.is_terminal and not console.is_dumb_terminal
    shown = Bar(print_line, budget_s, sys.stderr, console if is_live else None)
    live: Any = contextlib.nullcontext()
    if is_live:
        live = Live(shown, console=console, transient=True, redirect_stdout=False, redirect_stderr=stream is sys.stderr)
    with live:
        yield shown
