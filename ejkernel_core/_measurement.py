"""The progress of a measurement, for stores that keep its results and for displays."""

from __future__ import annotations

from typing import Any

import attrs

from ._display import config_text, repr_of
from ._errors import printable
from ._invocation import Invocation
from ._records import Reason


@attrs.frozen
class Entry:
    """The result for one configuration."""

    backend: str
    cfg: Any = attrs.field(repr=repr_of)
    #: The median time of one call, and the distance between the quartiles; None where it was not measured.
    milliseconds: float | None = None
    spread: float | None = None
    #: Why it was excluded; "" if it was measured to the end.
    reason: str = attrs.field(default="", converter=printable)
    #: Whether it is the kernel's heuristic configuration, which is used without measuring.
    is_usual: bool = False
    #: Whether its results were compared with those of the reference.
    is_checked: bool = False

    @property
    def is_reached(self) -> bool:
        """Whether there is a result: a time, or a reason that is about the configuration."""
        return self.milliseconds is not None or bool(self.reason and not self.reason.startswith(Reason.OUT_OF_TIME))

    @property
    def outcome(self) -> float | str:
        """What a record has of it: its time, or else why it has none, or none that counts."""
        is_timed = not self.reason or self.reason.startswith((Reason.OUT_OF_TIME, Reason.SLOWER))
        return self.milliseconds if self.milliseconds is not None and is_timed else self.reason


@attrs.frozen(eq=False)
class Trial:
    """A configuration that is compiled or run now: if the process crashes, it may be the cause."""

    backend: str
    cfg: Any = attrs.field(repr=repr_of)
    #: "compiling" or "running".
    step: str

    def __str__(self) -> str:
        return f"{self.step} {self.backend} {config_text(self.cfg)}"


@attrs.frozen
class Progress:
    """The progress of a measurement."""

    inv: Invocation
    entries: tuple[Entry, ...]
    seconds: float
    budget_s: float
    finished: bool = False
    #: The configurations that are compiled or run now; several are compiled at once.
    trials: tuple[Trial, ...] = ()
    #: Whether it ended early, by Ctrl-C or an exception, so that there will be no more entries.
    interrupted: bool = False

    def __str__(self) -> str:
        measured_count = sum(entry.milliseconds is not None for entry in self.entries)
        excluded = sum(bool(entry.reason) for entry in self.entries)
        best = min((e.milliseconds for e in self.entries if e.milliseconds is not None), default=None)
        fastest = "" if best is None else f", best {best:.4g} ms"
        return (
            f"tuning {self.inv.op}: {measured_count} of {len(self.entries)} measured, {excluded} out{fastest}, "
            f"{self.seconds:.0f} of {self.budget_s:.0f} s{self._current}"
        )

    @property
    def _current(self) -> str:
        if not self.trials:
            return ""
        *others, last = self.trials
        others_text = f" and {len(others)} more" if others else ""
        return f"; {last}{others_text}, of {self.inv}"


@attrs.frozen
class Earlier:
    """What a store has of an unfinished measurement, which ended by Ctrl-C or with its process."""

    #: The configurations that were measured or excluded, some with a reason that begins with ``Reason.CRASHED``.
    entries: tuple[Entry, ...] = ()
    #: The configurations that were tried when a process crashed. They are tried last, one at a time.
    crashed: tuple[Trial, ...] = ()
