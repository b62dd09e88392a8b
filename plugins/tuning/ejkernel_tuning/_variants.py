"""The variants to measure, in order, with the results that are known from earlier measurements."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from ejkernel_core import Candidate, Invocation, Record, Unsupported
from ejkernel_core.extend import Broken, Entry, LoadedKernel, Reason, Trial, content, plugin_faults, text_of

from ._checks import fault_text
from ._measurement import Variant

#: A space has ended if it repeats configurations this often in a row.
MAX_REPEATED = 10_000


@attrs.frozen
class KnownResults:
    """The results of earlier measurements of the call."""

    #: Those of an unfinished measurement.
    entries: Sequence[Entry] = ()
    #: What was tried when a process crashed.
    crashed: Sequence[Trial] = ()
    #: The best record of a measurement that ran out of time.
    record: Record | None = None

    def apply_to(self, variant: Variant) -> Variant:
        """Set what is known of a variant, and return it."""
        if self.record is not None:
            self._apply_record(variant, self.record)
        for entry in self.entries:
            if _is_same(variant, entry) and _is_still_valid(entry):
                variant.reason, variant.is_checked = entry.reason or None, entry.is_checked
                if entry.milliseconds is not None:
                    variant.samples, variant.has_earlier_result = [entry.milliseconds], True
        if any(_is_same(variant, trial) for trial in self.crashed):
            variant.may_crash, variant.has_earlier_result, variant.samples = True, False, []
        return variant

    def _apply_record(self, variant: Variant, record: Record) -> None:
        """Exclude a variant that was slower than the record. Those of the record and of the heuristic are measured
        again, together with new variants.
        """
        assert record.provenance is not None
        if variant.is_usual or _is_same(variant, record):
            return
        outcome = dict(record.provenance.tried).get(f"{variant.backend} {text_of(variant.cfg)}")
        if isinstance(outcome, str):
            # The stores decide whether one that ended a process is tried again.
            variant.reason = None if outcome.startswith((Reason.OUT_OF_TIME, Reason.CRASHED)) else outcome
        elif outcome is not None:
            variant.samples, variant.reason = [float(outcome)], f"{Reason.SLOWER}: {outcome:.4g} ms, measured before"


def _is_same(variant: Variant, other: Entry | Trial | Record) -> bool:
    return variant.backend == other.backend and content(variant.cfg) == content(other.cfg)


def _is_still_valid(entry: Entry) -> bool:
    """Whether an earlier result counts. One that depends on results counts only if a reference checked them."""
    is_about_results = entry.milliseconds is not None or entry.reason.startswith(Reason.WRONG)
    return entry.is_reached and (entry.is_checked or not is_about_results)


@attrs.define
class VariantSource:
    """Makes the variants of one measurement: first that of the heuristic, and all others on demand."""

    inv: Invocation
    candidates: Sequence[Candidate]
    #: The kernel that results are compared with.
    reference: LoadedKernel | Broken | None
    #: The configurations that the caller allows; None for all.
    configs: list[Any] | None
    known: KnownResults
    deadline: float
    #: The faults of plugins.
    notes: list[str] = attrs.field(factory=list)

    def first_variants(self) -> list[Variant]:
        """The variant of the heuristic, and that of the reference if it is a candidate."""
        assert self.inv.operation is not None
        best_candidate = self.candidates[0]
        candidates = [c for c in self.candidates if c is best_candidate or c.backend == self.inv.operation.reference]
        return [self._variant(c, c.cfg) for c in candidates if self._is_included(c.cfg)]

    def reference_variant(self, first_variants: Sequence[Variant]) -> Variant | None:
        """The variant that gives the expected results: one of the first, or else a separate one. None where there is no
        reference.
        """
        if isinstance(self.reference, Broken):
            self.notes.append(f"the reference is broken: {self.reference.reason}")
        if self.reference is None or isinstance(self.reference, Broken):
            return None
        backend = self.reference.backend
        own_variant = next((v for v in first_variants if v.backend == backend and not v.has_earlier_result), None)
        return own_variant or self._separate_reference(self.reference)

    def _separate_reference(self, kernel: LoadedKernel) -> Variant:
        variant = Variant(kernel, None)
        try:
            variant.cfg = kernel.heuristic_cfg(self.inv)
        except Unsupported as refusal:
            variant.reason = f"refused, {refusal}"
        except plugin_faults() as fault:  # a broken kernel excludes only itself
            variant.reason = fault_text("heuristic_cfg", fault)
        own_result = self.known.apply_to(attrs.evolve(variant))
        # Its results are needed again even if it was measured before, unless it may end the process.
        variant.may_crash = own_result.may_crash
        variant.reason = variant.reason or (None if own_result.samples else own_result.reason)
        return variant

    def others(self) -> Iterator[Variant]:
        """All other variants: the heuristics of the other kernels, then the configuration spaces of all kernels."""
        assert self.inv.operation is not None
        for candidate in self.candidates[1:]:
            if self._is_included(candidate.cfg) and candidate.backend != self.inv.operation.reference:
                yield self._variant(candidate, candidate.cfg)
        for candidate in self.candidates:
            for cfg in self._space(candidate):
                yield self._variant(candidate, cfg)

    def _variant(self, candidate: Candidate, cfg: Any) -> Variant:
        is_usual = candidate is self.candidates[0] and cfg is candidate.cfg
        variant = self.known.apply_to(Variant(candidate.kernel, cfg, is_usual))
        if self.configs is not None:  # the caller's; a kernel's own configurations need no check
            try:
                candidate.kernel.check_cfg(self.inv, cfg)
            except Unsupported as refusal:
                variant.reason = f"refused, {refusal}"
        return variant

    def _is_included(self, cfg: Any) -> bool:
        return self.configs is None or content(cfg) in map(content, self.configs)

    def _space(self, candidate: Candidate) -> Iterator[Any]:
        """The configurations of one kernel without its heuristic's, each once, until the deadline."""
        seen_contents, repeated = {content(candidate.cfg)}, 0
        for cfg in self._configs_of(candidate):
            if time.monotonic() >= self.deadline or repeated >= MAX_REPEATED:
                return
            repeated += 1
            if content(cfg) not in seen_contents:
                seen_contents.add(content(cfg))
                yield cfg
                repeated = 0

    def _configs_of(self, candidate: Candidate) -> Iterator[Any]:
        """The caller's configurations for this kernel, or the valid ones in its configuration space."""
        kernel, config_type = candidate.kernel, candidate.config_type
        if self.configs is not None:
            # As in a call with ``cfg``, a kernel without a Config takes none.
            yield from (cfg for cfg in self.configs if isinstance(cfg, config_type or ()))
            return
        yield from kernel.configurations(self.inv, lambda fault: self._note(f"{kernel.name}: {fault}"))

    def _note(self, fault: str) -> None:
        if fault not in self.notes:
            self.notes.append(fault)
