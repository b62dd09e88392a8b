"""The plan of a call: the choice, and the verdicts on all kernels and policies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs

from ._content import plain
from ._display import config_text, html_table, html_text, one_line, repr_of
from ._errors import printable
from ._invocation import Invocation
from ._kernel import LoadedKernel
from ._keys import Key
from ._records import Record

if TYPE_CHECKING:  # imported when arrays are sharded, which most programs do not need
    from ._partitioning import Division

#: The origins of a choice by rank: without a configuration for the call, and with the caller's.
HEURISTIC, EXPLICIT = "heuristic", "explicit cfg"
#: That of a choice for which the call was measured.
AUTOTUNED = "autotuned"


def _plain_text(text: Any) -> str:
    return printable(plain(text))


@attrs.frozen
class Choice:
    """The answer of a policy: a candidate's backend, a configuration, and where it comes from."""

    backend: str = attrs.field(converter=plain)
    cfg: Any = attrs.field(repr=repr_of)
    origin: str = attrs.field(converter=plain)
    #: The key and the record that it comes from.
    key: Key | None = attrs.field(default=None, repr=str)
    record: Record | None = None
    #: True for a result that was measured just now, which the stores have to store.
    measured: bool = False
    #: How far the call is from that of the record, in powers of two; 0 for the call itself, or one in its bucket.
    distance: float = 0.0
    #: A remark for explanations.
    note: str = attrs.field(default="", converter=_plain_text)

    def __str__(self) -> str:
        source = printable(self.origin) + (f" ({self.note})" if self.note else "")
        source += f"\n  remembered as {self.key}" if self.key else ""
        provenance = self.record.provenance if self.record else None
        if provenance is None:
            return source + (", put there by hand" if self.key else "")
        return "\n  ".join([f"{source}, {provenance}", *provenance.crashes])


@attrs.frozen
class Verdict:
    """The status of one installed kernel or policy for a call, and the reason."""

    name: str
    provider: str
    #: "chosen", "able" (and not chosen), "refused" (Unsupported), "left out" (not asked for), "broken"; of a policy,
    #: "no answer" (Unsupported) or "broken".
    status: str
    reason: str = attrs.field(converter=printable)

    def __str__(self) -> str:
        # The lines of a reason stay apart from those of the next verdict.
        reason = "\n    ".join(self.reason.splitlines())
        return f"{self.name} ({self.provider}): {self.status}" + (f", {reason}" if reason else "")


@attrs.frozen(eq=False, repr=False)
class Plan:
    """The outcome for one invocation: the kernel, its configuration, their origin, and the verdicts on all others."""

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
        """Where the configuration comes from."""
        return self.choice.origin

    @property
    def _kernel_and_cfg(self) -> str:
        return self.kernel.name if self.cfg is None else f"{self.kernel.name} with {config_text(self.cfg)}"

    def why_not(self, verdict: Verdict) -> str:
        """Why another kernel was chosen than the able one of this verdict."""
        record = self.choice.record
        if record is not None and record.provenance is not None:
            return record.provenance.why_not(verdict.name.rpartition(".")[2])
        is_by_rank = self.origin in (HEURISTIC, EXPLICIT)
        return "with a lower rank" if is_by_rank else f"another one was chosen by {self.origin}"

    def run(self, inv: Invocation) -> tuple[Any, ...]:
        """Run the chosen kernel."""
        return self.kernel.run_backend(inv, self.cfg)

    def __str__(self) -> str:
        lines = [f"{self._kernel_and_cfg}, by {self.choice}", f"  for {self.invocation}"]
        return "\n".join([*lines, *(f"  {verdict}" for verdict in self.verdicts)])

    @property
    def summary(self) -> str:
        """Kernel, configuration and origin, in one line."""
        return one_line(f"{self._kernel_and_cfg}, by {self.origin}")

    def __repr__(self) -> str:
        return f"Plan({self.summary})"

    def _repr_html_(self) -> str:
        choice = [("configuration", config_text(self.cfg)), ("chosen by", self.choice), ("for", self.invocation)]
        verdicts = [(v.name, v.provider, v.status, v.reason) for v in self.verdicts]
        return html_table(self.kernel.name, [*choice, *verdicts])


@attrs.frozen(eq=False, repr=False)
class Explanation:
    """The plan of a call, or the error instead, and the explanation of its backward operation."""

    op: str
    plan: Plan | None
    error: str | None
    backward: Explanation | None = None
    #: The verdicts on all installed kernels and policies, also where there is no plan.
    verdicts: tuple[Verdict, ...] = ()
    #: Those of the calls that the kernel makes.
    parts: tuple[Explanation, ...] = ()
    #: None for a call on one device.
    division: Division | None = None
    note: str = "a function that JAX has already compiled keeps its choice until it is traced again"
    #: About the process: the environment variables that look like ours and are read by nothing.
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = (str(self.plan) if self.plan else self.error or "") + (f"\n  {self.division}" if self.division else "")
        text += "".join(f"\n  {line}" for line in self._part_lines())
        text += f"\n{self.backward}" if self.backward else f"\n  ({self.note})"
        return "\n  ".join([text, *self.remarks])

    def _part_lines(self) -> Iterator[str]:
        """The parts, each with what runs it below, and with its own parts further to the right."""
        for part in self.parts:
            yield f"part: {part.plan.invocation.call_text}" if part.plan else f"part: {part.op}"
            yield f"  {part.summary}"
            yield from (f"  {line}" for line in part._part_lines())

    @property
    def summary(self) -> str:
        """The summary of the plan, or the error, and that of the backward operation, in one line."""
        summary = self.plan.summary if self.plan else one_line(self.error)
        return summary + (f"; {self.backward.summary}" if self.backward else "")

    def __repr__(self) -> str:
        return f"Explanation({self.summary})"

    def _repr_html_(self) -> str:
        html = self.plan._repr_html_() if self.plan else html_text(self.error)
        parts = "\n".join(self._part_lines())
        html += "".join(map(html_text, filter(None, (parts, self.division, *self.remarks))))
        if self.backward:
            return html + self.backward._repr_html_()
        return html + (html_text(self.note) if self.plan else "")
