"""The outcome of a choice, and what it is made of."""

from __future__ import annotations

from typing import Any

import attrs

from ._display import html_table, html_text, one_line
from ._kernel import Invocation, LoadedKernel
from ._keys import Key
from ._records import Record


@attrs.frozen
class Choice:
    """What a policy answers: which candidate, with which configuration, and where the answer came from."""

    backend: str
    cfg: Any
    origin: str
    #: What it was remembered by, and how it was found out.
    key: Key | None = attrs.field(default=None, repr=str)
    record: Record | None = None
    #: True for what was measured just now: those who remember are told.
    measured: bool = False
    #: How far the call is from the one that is remembered, in powers of two; 0 for the call itself, or one like it.
    distance: float = 0.0
    #: What there is to know about it.
    note: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        found = note + (f"\n  remembered as {self.key}" if self.key else "")
        provenance = self.record.provenance if self.record else None
        if provenance is None:
            return f"{self.origin}{found}" + (", put there by hand" if found else "")
        return "\n  ".join([f"{self.origin}{found}, {provenance}", *provenance.casualties])


@attrs.frozen
class Verdict:
    """What became of one installed kernel or policy, and why."""

    name: str
    provider: str
    #: "chosen", "able" (and not chosen), "refused" (Unsupported), "left out" (not asked for), "broken"; of a policy,
    #: "no answer" (Unsupported) or "broken".
    status: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.provider}): {self.status}" + (f", {self.reason}" if self.reason else "")


@attrs.frozen(eq=False, repr=False)
class Plan:
    """The outcome for one invocation: the kernel, its configuration, where they came from, and all the others."""

    invocation: Invocation
    kernel: LoadedKernel
    choice: Choice
    verdicts: tuple[Verdict, ...]

    @property
    def cfg(self) -> Any:
        """The configuration that was chosen."""
        return self.choice.cfg

    @property
    def origin(self) -> str:
        """Who chose it."""
        return self.choice.origin

    def run(self, inv: Invocation) -> tuple[Any, ...]:
        """Run the chosen kernel, and nobody else."""
        return self.kernel.run_backend(inv, self.cfg)

    def __str__(self) -> str:
        lines = [f"{self.kernel.name} with {self.cfg}, by {self.choice}", f"  for {self.invocation}"]
        return "\n".join([*lines, *(f"  {verdict}" for verdict in self.verdicts)])

    @property
    def summary(self) -> str:
        """Kernel, configuration and origin, in one line."""
        return one_line(f"{self.kernel.name} with {self.cfg}, by {self.origin}")

    def __repr__(self) -> str:
        return f"Plan({self.summary})"

    def _repr_html_(self) -> str:
        own = [("configuration", self.cfg), ("chosen by", self.choice), ("for", self.invocation)]
        others = [(v.name, v.provider, v.status, v.reason) for v in self.verdicts]
        return html_table(self.kernel.name, [*own, *others])


@attrs.frozen(eq=False, repr=False)
class Explanation:
    """Why a call does what it does: its plan (or why it has none), and that of its backward operation."""

    op: str
    plan: Plan | None
    error: str | None
    backward: Explanation | None = None
    #: What became of every installed kernel and policy, where there is a plan and where there is none.
    verdicts: tuple[Verdict, ...] = ()
    note: str = "a function that JAX has already compiled keeps its choice until it is traced again"

    def __str__(self) -> str:
        own = str(self.plan) if self.plan else self.error or ""
        return own + (f"\n{self.backward}" if self.backward else f"\n  ({self.note})")

    @property
    def summary(self) -> str:
        """That of the plan and of the backward's, or the error, in one line."""
        own = self.plan.summary if self.plan else one_line(self.error)
        return own + (f"; {self.backward.summary}" if self.backward else "")

    def __repr__(self) -> str:
        return f"Explanation({self.summary})"

    def _repr_html_(self) -> str:
        own = self.plan._repr_html_() if self.plan else html_text(self.error)
        if self.backward:
            return own + self.backward._repr_html_()
        return own + (html_text(self.note) if self.plan else "")
