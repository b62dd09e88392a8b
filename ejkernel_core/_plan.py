"""The outcome of a choice, and what it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import attrs

from ._display import html_table, html_text, one_line
from ._kernel import Invocation, LoadedKernel
from ._keys import Key
from ._records import Record


@attrs.frozen
class Candidate:
    """A kernel that can do the invocation, with its heuristic configuration, or the one that the caller gave."""

    kernel: LoadedKernel
    cfg: Any
    explicit: bool = False
    #: The versions of all that could change which candidate is best, and with which configuration.
    software: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    #: That of the kernel.
    backend: str = attrs.field(init=False, repr=False, default=attrs.Factory(attrgetter("kernel.backend"), True))

    @property
    def config_type(self) -> type | None:
        """The type of its configurations: as the kernel says, or as its heuristic does."""
        return self.kernel.config_type or (None if self.cfg is None else type(self.cfg))


def fitting(records: Iterable[Record], candidate: Candidate) -> Record | None:
    """The first that is for the candidate's kernel; one without a backend is for every kernel that takes its type.

    What was measured with other versions comes after all that was not.

    >>> from types import SimpleNamespace
    >>> candidate = SimpleNamespace(backend="xla", config_type=int, software={})  # as far as is looked at here
    >>> fitting([Record(64, "triton"), Record("no int"), Record(128)], candidate)
    Record(cfg=128, backend=None, provenance=None)
    """
    kind = candidate.config_type
    ours = [r for r in records if r.backend in (None, candidate.backend) and (kind is None or isinstance(r.cfg, kind))]
    return min(ours, key=lambda record: bool(changes(record, candidate)), default=None)


def changes(record: Record, candidate: Candidate) -> str:
    """Which versions are others than those that the record was measured with; "" for none."""
    return record.provenance.changes(candidate.software) if record.provenance else ""


def of_here(record: Record, candidates: Iterable[Candidate]) -> Record:
    """The record of what was measured just now, with the versions that are here."""
    if record.provenance is None:
        return record
    here = {name: version for candidate in candidates for name, version in candidate.software.items()}
    return attrs.evolve(
        record, provenance=attrs.evolve(record.provenance, software={**here, **record.provenance.software})
    )


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


@attrs.frozen
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


@attrs.frozen
class Explanation:
    """Why a call does what it does: its plan (or why it has none), and that of its backward operation."""

    op: str
    plan: Plan | None
    error: str | None
    backward: Explanation | None = None
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
