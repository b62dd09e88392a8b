"""What a measurement tells of its configurations: to the stores that keep it, and to whoever shows how far it is."""

from __future__ import annotations

from typing import Any

import attrs

from ._kernel import Invocation

#: How the reasons begin that say nothing about the configuration.
OUT_OF_TIME = "out of time"


@attrs.frozen
class Entry:
    """What became of one configuration."""

    backend: str
    cfg: Any
    #: The median of one call, and the distance of the quartiles; None where it was not measured.
    milliseconds: float | None = None
    spread: float | None = None
    #: Why it is out; "" for what stayed in to the end.
    reason: str = ""
    #: It is what is taken without measuring.
    is_usual: bool = False
    #: Its results were compared with those of the reference.
    is_checked: bool = False

    @property
    def is_reached(self) -> bool:
        """Whether anything was found out about it."""
        return self.milliseconds is not None or bool(self.reason and not self.reason.startswith(OUT_OF_TIME))


@attrs.frozen(eq=False)
class Trial:
    """A configuration at hand: whatever it does to the process, it does now."""

    backend: str
    cfg: Any
    #: "compiling" or "running".
    step: str

    def __str__(self) -> str:
        return f"{self.step} {self.backend} {self.cfg}"


@attrs.frozen
class Progress:
    """How far a measurement is."""

    inv: Invocation
    entries: tuple[Entry, ...]
    seconds: float
    budget_s: float
    finished: bool = False
    #: What is compiled or run at this moment; several are compiled at once.
    trials: tuple[Trial, ...] = ()
    #: It ends before its time, by Ctrl-C or a fault: the entries are all there will be.
    interrupted: bool = False

    def __str__(self) -> str:
        ready = sum(entry.milliseconds is not None for entry in self.entries)
        out = sum(bool(entry.reason) for entry in self.entries)
        best = min((e.milliseconds for e in self.entries if e.milliseconds is not None), default=None)
        fastest = "" if best is None else f", best {best:.4g} ms"
        return (
            f"tuning {self.inv.op}: {ready} of {len(self.entries)} measured, {out} out{fastest}, "
            f"{self.seconds:.0f} of {self.budget_s:.0f} s{self._current}"
        )

    @property
    def _current(self) -> str:
        if not self.trials:
            return ""
        *others, last = self.trials
        beside = f" and {len(others)} more" if others else ""
        return f"; {last}{beside}, of {self.inv}"


@attrs.frozen
class Earlier:
    """What a store kept of a measurement that did not come to its end, because of Ctrl-C or the end of its process."""

    #: What was measured, and what is out; the latter also by a reason that begins with ``DIED``.
    entries: tuple[Entry, ...] = ()
    #: What was being tried when a process died: it is tried last, and alone.
    suspects: tuple[Trial, ...] = ()
