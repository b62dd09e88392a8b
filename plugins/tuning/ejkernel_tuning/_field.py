"""Who takes part in a contest, in which order, and with what is known of it from before."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from ejkernel_core import Candidate
from ejkernel_core._discovery import Broken
from ejkernel_core._errors import NEVER_CAUGHT, Unsupported
from ejkernel_core._kernel import Invocation, LoadedKernel
from ejkernel_core._keys import content
from ejkernel_core._measurement import OUT_OF_TIME, Entry, Trial
from ejkernel_core._records import DIED, Record

from ._contest import Entrant
from ._judging import fault_text

#: A space that gives that many in a row that are nothing new has come to its end.
REPEATED = 10_000


@attrs.frozen
class Past:
    """What is known before a contest begins."""

    #: Of a contest that was interrupted.
    entries: Sequence[Entry] = ()
    #: What was tried when a process died.
    suspects: Sequence[Trial] = ()
    #: The winner of a contest whose budget was too short.
    record: Record | None = None

    def applied(self, entrant: Entrant) -> Entrant:
        """The entrant, with what is known of it."""
        if self.record is not None:
            self._apply_record(entrant, self.record)
        for entry in self.entries:
            if _is_of(entrant, entry) and _holds(entry):
                entrant.reason, entrant.is_checked = entry.reason or None, entry.is_checked
                if entry.milliseconds is not None:
                    entrant.samples, entrant.is_settled = [entry.milliseconds], True
        if any(_is_of(entrant, trial) for trial in self.suspects):
            entrant.is_suspect, entrant.is_settled, entrant.samples = True, False, []
        return entrant

    def _apply_record(self, entrant: Entrant, record: Record) -> None:
        """What the winner has beaten is out; the winner itself and the heuristic's race against those that are new."""
        assert record.provenance is not None
        if entrant.is_usual or _is_of(entrant, record):
            return
        outcome = dict(record.provenance.tried).get(f"{entrant.backend} {entrant.cfg}")
        if isinstance(outcome, str):
            # Whether one that took a process with it may be tried again is for the stores to say.
            entrant.reason = None if outcome.startswith((OUT_OF_TIME, DIED)) else outcome
        elif outcome is not None:
            entrant.samples, entrant.reason = [float(outcome)], f"slower: {outcome:.4g} ms, measured before"


def _is_of(entrant: Entrant, other: Entry | Trial | Record) -> bool:
    return entrant.backend == other.backend and content(entrant.cfg) == content(other.cfg)


def _holds(entry: Entry) -> bool:
    """What was out is out, and what was measured need not race. Results without a reference have to be seen again."""
    is_about_results = entry.milliseconds is not None or entry.reason.startswith("wrong")
    return entry.is_reached and (entry.is_checked or not is_about_results)


@attrs.define
class Field:
    """The entrants of one contest: the heuristic's own first, and every other one when it is asked for."""

    inv: Invocation
    candidates: Sequence[Candidate]
    #: The kernel whose results all others have to have.
    reference: LoadedKernel | Broken | None
    #: Those that the caller narrowed it down to; None for all.
    configs: list[Any] | None
    past: Past
    deadline: float
    #: The faults of plugins.
    notes: list[str] = attrs.field(factory=list)

    def first(self) -> list[Entrant]:
        """The heuristic's own, and the reference where it takes part."""
        assert self.inv.operation is not None
        usual = self.candidates[0]
        both = [c for c in self.candidates if c is usual or c.backend == self.inv.operation.reference]
        return [self._entrant(c, c.cfg) for c in both if self._is_given(c.cfg)]

    def judge(self, first: Sequence[Entrant]) -> Entrant | None:
        """The reference: the one that takes part, or one beside the contest; None where there is none."""
        if isinstance(self.reference, Broken):
            self.notes.append(f"the reference is broken: {self.reference.reason}")
        if self.reference is None or isinstance(self.reference, Broken):
            return None
        own = next((e for e in first if e.backend == self.reference.backend and not e.is_settled), None)
        return own or self._stand_in(self.reference)

    def _stand_in(self, kernel: LoadedKernel) -> Entrant:
        entrant = Entrant(kernel, None)
        try:
            entrant.cfg = kernel.heuristic_cfg(self.inv)
        except Unsupported as refusal:
            entrant.reason = f"refused, {refusal}"
        except NEVER_CAUGHT:
            raise
        except BaseException as fault:  # as for every kernel: it is this one that is out
            entrant.reason = fault_text("heuristic_cfg", fault)
        known = self.past.applied(attrs.evolve(entrant))
        # Its results are needed even where they were seen before; but not at the price of the process.
        entrant.is_suspect = known.is_suspect
        entrant.reason = entrant.reason or (None if known.samples else known.reason)
        return entrant

    def others(self) -> Iterator[Entrant]:
        """Every other one: the heuristics' of the other kernels, then what the kernels offer."""
        assert self.inv.operation is not None
        for candidate in self.candidates[1:]:
            if self._is_given(candidate.cfg) and candidate.backend != self.inv.operation.reference:
                yield self._entrant(candidate, candidate.cfg)
        for candidate in self.candidates:
            for cfg in self._space(candidate):
                yield self._entrant(candidate, cfg)

    def _entrant(self, candidate: Candidate, cfg: Any) -> Entrant:
        is_usual = candidate is self.candidates[0] and cfg is candidate.cfg
        entrant = self.past.applied(Entrant(candidate.kernel, cfg, is_usual))
        if self.configs is not None:  # the kernel offers none that it does not take
            try:
                candidate.kernel.check_cfg(self.inv, cfg)
            except Unsupported as refusal:
                entrant.reason = f"refused, {refusal}"
        return entrant

    def _is_given(self, cfg: Any) -> bool:
        return self.configs is None or content(cfg) in map(content, self.configs)

    def _space(self, candidate: Candidate) -> Iterator[Any]:
        """The configurations of one kernel beside its heuristic's, each once, as long as there is time."""
        known, repeated = {content(candidate.cfg)}, 0
        for cfg in self._offered(candidate):
            if time.monotonic() >= self.deadline or repeated >= REPEATED:
                return
            repeated += 1
            if content(cfg) not in known:
                known.add(content(cfg))
                yield cfg
                repeated = 0

    def _offered(self, candidate: Candidate) -> Iterator[Any]:
        """What the caller gives for this kernel, or else what it offers itself, as far as that is good for anything."""
        kernel, kind = candidate.kernel, candidate.config_type
        if self.configs is not None:
            yield from (cfg for cfg in self.configs if kind is None or isinstance(cfg, kind))
            return
        yield from kernel.configurations(self.inv, lambda fault: self._note(f"{kernel.name}: {fault}"))

    def _note(self, fault: str) -> None:
        if fault not in self.notes:
            self.notes.append(fault)
