"""Measuring what nothing is remembered of: once, by one thread of one process, and everybody learns of it."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from ._discovery import Broken
from ._display import counted
from ._errors import NoConfig, PluginError, Unsupported
from ._kernel import Candidate, Invocation, LoadedKernel, of_here
from ._measurement import Earlier, Progress
from ._plan import Choice
from ._policies import Policies, is_short, learn, misfit, recalled, tell, tuner_name
from ._records import Record
from ._scopes import Scope

#: How much longer than the budget a thread waits for another's measurement.
GRACE_S = 30.0


def check_tunable(inv: Invocation) -> None:
    """Whether measuring here would say anything about the call: ``Unsupported`` if not."""
    if inv.device_kind is None:
        raise Unsupported(f"there is no {inv.platform} here to measure on")
    if inv.sharding:
        raise Unsupported(
            "its arrays are cut over several devices: call it inside shard_map, and the shards are measured"
        )


class _Flight:
    """A measurement under way."""

    def __init__(self) -> None:
        self.landed = threading.Event()
        self.choice: Choice | None = None

    def answer(self, seconds: float) -> Choice:
        """What was measured, once it was."""
        if not self.landed.wait(seconds):
            raise Unsupported("another thread is measuring this; the heuristic is taken meanwhile")
        if self.choice is None:
            raise Unsupported("another thread has measured this, and nothing came of it")
        return self.choice


#: Of the process: what one registry measures, another need not measure at the same time.
_flights: dict[Any, _Flight] = {}
_lock = threading.Lock()


def measured(
    inv: Invocation,
    candidates: Sequence[Candidate],
    judge: LoadedKernel | Broken | None,
    policies: Policies,
    scope: Scope,
    record: Record | None,
) -> Choice:
    """The fastest of all configurations of all candidates, measured once, by one thread; going on with a ``record``
    whose budget was too short. ``Unsupported`` where nothing could be measured.
    """
    if tuner_name(policies) is None:
        raise NoConfig(
            f"{inv.op}: the policy says to measure, and nothing that is installed does: 'pip install ejkernel-tuning' "
            "brings what measures; policy_override(mode='off') takes what is remembered, or the heuristic"
        )
    check_tunable(inv)
    if not scope.may_measure:
        raise Unsupported(_prospect(candidates, record))
    # The same for every call that is alike: one of them is measured, the others are served by its record.
    key = inv.tuning_keys[-1], tuple(candidate.backend for candidate in candidates)
    own = _Flight()
    with _lock:
        flight = _flights.setdefault(key, own)
    if flight is not own:
        return flight.answer(scope.policy.budget_s + GRACE_S if scope.policy.wait else 0)
    try:
        choice = _contest(inv, candidates, judge, policies, scope, record)
        own.choice = attrs.evolve(choice, measured=False)
    finally:
        with _lock:
            del _flights[key]
        own.landed.set()
    return choice


def _contest(
    inv: Invocation,
    candidates: Sequence[Candidate],
    judge: LoadedKernel | Broken | None,
    policies: Policies,
    scope: Scope,
    record: Record | None,
) -> Choice:
    with taking_turns(policies, inv, scope) as (earlier, turn):
        meanwhile, *_ = recalled(inv, candidates, policies, scope)
        if meanwhile is not None and meanwhile.record is not None and not is_short(meanwhile, scope.policy):
            return meanwhile  # another process was quicker
        records = policies.tuners.hook.measure(
            inv=inv,
            candidates=candidates,
            judge=judge,
            scope=scope,
            earlier=earlier,
            record=record,
            report=turn.report,
        )
        if not records:
            raise PluginError("it gives no record; where nothing can be measured, it raises Unsupported")
        winner = records[0]
        wrong = misfit(Choice(winner.backend or "", winner.cfg, "measure", None, winner, measured=True), candidates)
        if wrong:
            raise PluginError(wrong)
        # Everybody is told before the others go on: whoever comes next finds it.
        return learn_records(policies, inv, [of_here(each, candidates) for each in records], record)


@attrs.define(eq=False)
class Turn:
    """One measurement, as the stores hear of it."""

    policies: Policies
    inv: Invocation
    budget_s: float
    _last: Progress | None = None

    def report(self, progress: Progress) -> None:
        """Tell how far it is."""
        self._last = progress
        tell(self.policies, "tuning_progress", inv=self.inv, progress=progress)

    def end(self, has_failed: bool) -> None:
        """Tell that this is all. Of a measurement that failed nothing is kept, unless it was interrupted."""
        last = self._last or Progress(self.inv, (), 0.0, self.budget_s)
        entries = () if has_failed and not last.interrupted else last.entries
        self.report(attrs.evolve(last, entries=entries, finished=True, trials=()))


@contextlib.contextmanager
def taking_turns(policies: Policies, inv: Invocation, scope: Scope) -> Iterator[tuple[Earlier, Turn]]:
    """Alone with this call, as far as stores keep others off it, and with what they know of it. ``Unsupported`` where
    another process is at it. They hear of the end, however it comes.
    """
    # What a store cannot tell is measured again.
    earlier = tell(policies, "tuning_started", until=Earlier, inv=inv, scope=scope) or Earlier()
    turn = Turn(policies, inv, scope.policy.budget_s)
    try:
        yield earlier, turn
    except BaseException:
        turn.end(has_failed=True)
        raise
    turn.end(has_failed=False)


def _prospect(candidates: Sequence[Candidate], record: Record | None) -> str:
    """What a call would have done, for who only asks."""
    if record is not None and record.provenance is not None:
        return f"would be measured further: {record.provenance.shortfall}"
    kernels = counted(len(candidates), "kernel")
    return f"would be measured: {kernels}; this is the plan until then"


def learn_records(policies: Policies, inv: Invocation, records: Sequence[Record], before: Record | None) -> Choice:
    """Have the winner remembered, and what became of the one ``before``, where that is another kernel's."""
    winner = records[0]
    choice = Choice(winner.backend or "", winner.cfg, "autotuned", inv.key, winner, measured=True)
    if before is not None and before.backend is not None and before.backend != winner.backend:
        own = next((record for record in records if record.backend == before.backend), None)
        loser = own or _outdone(before, winner)
        learn(policies, inv, attrs.evolve(choice, backend=before.backend, cfg=loser.cfg, record=loser))
    learn(policies, inv, choice)
    return choice


def _outdone(before: Record, winner: Record) -> Record:
    """One that did not come through this time: it is no faster than the winner, whatever it was before."""
    assert winner.provenance is not None
    slower = math.nextafter(winner.provenance.milliseconds, math.inf)
    return attrs.evolve(before, provenance=attrs.evolve(winner.provenance, milliseconds=slower))
