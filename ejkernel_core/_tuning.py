"""Measuring a call for which no store has a record: once, in one thread of one process, for all stores."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from ._display import quantity
from ._errors import NoConfig, PluginError, Unsupported
from ._invocation import Invocation
from ._kernel import Candidate, with_versions
from ._measurement import Earlier, Progress
from ._plan import AUTOTUNED, Choice
from ._policies import Policies, Selection, ask_policies, fault_of_choice, is_incomplete, notify, remember, tuner_name
from ._records import Record

#: How much longer than the budget a thread waits for the measurement of another thread.
GRACE_S = 30.0


def check_tunable(inv: Invocation) -> None:
    """Raise ``Unsupported`` where a measurement in this process would say nothing about the call."""
    if inv.device_kind is None:
        raise Unsupported(f"there is no {inv.platform} here to measure on")


class _Measurement:
    """A measurement that one thread makes, and that others wait for."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.choice: Choice | None = None

    def wait_for_choice(self, seconds: float) -> Choice:
        """Wait for the measurement, and return its choice. ``Unsupported`` where there is none in time."""
        if not self.done.wait(seconds):
            raise Unsupported("another thread is measuring this; the heuristic is taken meanwhile")
        if self.choice is None:
            raise Unsupported("another thread has measured this, and nothing came of it")
        return self.choice


#: The measurements of this process, for all registries: two of them do not measure the same call at the same time.
_measurements: dict[Any, _Measurement] = {}
_lock = threading.Lock()


def measure_once(selection: Selection, candidates: Sequence[Candidate], record: Record | None) -> Choice:
    """The fastest of all configurations of all candidates. One thread measures, and others wait for its result. With
    the ``record`` of a measurement that ran out of time, it continues there. ``Unsupported`` where nothing could be
    measured.
    """
    inv, scope = selection.inv, selection.scope
    if tuner_name(selection.policies) is None:
        raise NoConfig(
            f"{inv.op}: the policy says to measure, and nothing that is installed does: 'pip install ejkernel-tuning' "
            "brings what measures; policy_override(mode='off') takes what is remembered, or the heuristic"
        )
    check_tunable(inv)
    if not scope.may_measure:
        raise Unsupported(_forecast(candidates, record))
    # All calls of a bucket have the same key here: one of them is measured, and the others use its record.
    key = inv.tuning_keys[-1], tuple(candidate.backend for candidate in candidates)
    measurement = _Measurement()
    with _lock:
        current = _measurements.setdefault(key, measurement)
    if current is not measurement:
        return current.wait_for_choice(scope.policy.budget_s + GRACE_S if scope.policy.wait else 0)
    try:
        choice = _measure(selection, candidates, record)
        measurement.choice = attrs.evolve(choice, measured=False)
    finally:
        with _lock:
            del _measurements[key]
        measurement.done.set()
    return choice


def _measure(selection: Selection, candidates: Sequence[Candidate], record: Record | None) -> Choice:
    inv, scope = selection.inv, selection.scope
    with exclusive_measurement(selection) as (earlier, reporter):
        choice, *_ = ask_policies(selection, candidates)
        if choice is not None and choice.record is not None and not is_incomplete(choice, scope.policy):
            return choice  # another process has measured it while this one waited
        records = selection.policies.tuners.hook.measure(
            inv=inv,
            candidates=candidates,
            reference=selection.reference,
            scope=scope,
            earlier=earlier,
            record=record,
            report=reporter.report,
        )
        if not records:
            raise PluginError("it gives no record; where nothing can be measured, it raises Unsupported")
        fastest = records[0]
        fault = fault_of_choice(
            Choice(fastest.backend or "", fastest.cfg, "measure", None, fastest, measured=True), candidates
        )
        if fault:
            raise PluginError(fault)
        # Stored before the waiting threads and processes go on, so that they find the records.
        return remember_records(selection, [with_versions(measured, candidates) for measured in records], record)


@attrs.define(eq=False)
class Reporter:
    """Passes the progress of one measurement on to the policies."""

    policies: Policies
    inv: Invocation
    budget_s: float
    _last: Progress | None = None

    def report(self, progress: Progress) -> None:
        """Notify the policies of the progress."""
        self._last = progress
        notify(self.policies, "tuning_progress", inv=self.inv, progress=progress)

    def end(self, has_failed: bool) -> None:
        """Notify the policies that the measurement has ended. One that failed has no entries, unless interrupted."""
        last = self._last or Progress(self.inv, (), 0.0, self.budget_s)
        entries = () if has_failed and not last.interrupted else last.entries
        self.report(attrs.evolve(last, entries=entries, finished=True, trials=()))


@contextlib.contextmanager
def exclusive_measurement(selection: Selection) -> Iterator[tuple[Earlier, Reporter]]:
    """Hold the measurement of this call for a ``with`` block, as far as the stores exclude other processes. The block
    gets the results of an unfinished measurement, and the policies are notified of the end in any case.
    ``Unsupported`` where another process measures the call, and the scope's policy does not wait, and where there is no
    such device here.
    """
    inv, policies, scope = selection.inv, selection.policies, selection.scope
    check_tunable(inv)
    earlier = notify(policies, "tuning_started", until=Earlier, inv=inv, scope=scope) or Earlier()
    reporter = Reporter(policies, inv, scope.policy.budget_s)
    try:
        yield earlier, reporter
    except BaseException:
        reporter.end(has_failed=True)
        raise
    reporter.end(has_failed=False)


def _forecast(candidates: Sequence[Candidate], record: Record | None) -> str:
    """What a call would measure, in words, for ``plan`` and ``explain``."""
    if record is not None and record.provenance is not None:
        return f"would be measured further: {record.provenance.shortfall}"
    kernels = quantity(len(candidates), "kernel")
    return f"would be measured: {kernels}; this is the plan until then"


def remember_records(selection: Selection, records: Sequence[Record], previous: Record | None) -> Choice:
    """Store the best record, and a new one for the backend of the ``previous`` best if that is slower now."""
    inv, policies, fastest = selection.inv, selection.policies, records[0]
    choice = Choice(fastest.backend or "", fastest.cfg, AUTOTUNED, inv.key, fastest, measured=True)
    if previous is not None and previous.backend is not None and previous.backend != fastest.backend:
        record_of_previous = next((record for record in records if record.backend == previous.backend), None)
        slower_record = record_of_previous or _slower_than(previous, fastest)
        remember(
            policies, inv, attrs.evolve(choice, backend=previous.backend, cfg=slower_record.cfg, record=slower_record)
        )
    remember(policies, inv, choice)
    return choice


def _slower_than(previous: Record, fastest: Record) -> Record:
    """The previous record with a time just above that of the fastest, because it failed this time."""
    assert fastest.provenance is not None
    milliseconds = math.nextafter(fastest.provenance.milliseconds, math.inf)
    return attrs.evolve(previous, provenance=attrs.evolve(fastest.provenance, milliseconds=milliseconds))
