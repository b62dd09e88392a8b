"""The measuring tier of the chain: a miss is measured once, by one thread, and everybody learns of it."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Sequence
from typing import Any

import attrs
import pluggy

from ejkernel_core._errors import Unsupported
from ejkernel_core._hookspecs import hookimpl
from ejkernel_core._invocation import Invocation
from ejkernel_core._plan import Candidate, Choice
from ejkernel_core._policies import first_answer, tell
from ejkernel_core._scopes import Scope

from ._autotune import Progress, check_tunable, tune
from ._result import Entry, Tuned

#: How much longer than the budget a thread waits for another's measurement.
GRACE_S = 30.0


@attrs.frozen
class Earlier:
    """What ``tuning_started`` gives: what was found out before somebody was interrupted."""

    entries: tuple[Entry, ...] = ()
    #: Another process is measuring it, and the policy does not wait so long.
    is_busy: bool = False


class Tuner:
    """The policy that measures, where the scope's policy says so."""

    RANK = 20

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[Any, _Flight] = {}

    @hookimpl
    def select_config(self, inv: Invocation, candidates: Sequence[Candidate], scope: Scope) -> Choice | None:
        """The fastest of all configurations of all candidates; ``Unsupported`` where nothing could be measured."""
        if scope.policy.mode != "on_miss":
            return None
        check_tunable(inv)
        # The same for every call that is alike: one of them is measured, the others are served by its record.
        key = inv.tuning_keys[-1], tuple(candidate.backend for candidate in candidates)
        with self._lock:
            flight, mine = self._flights.get(key), False
            if flight is None:
                flight, mine = _Flight(), True
                self._flights[key] = flight
        if not mine:
            return flight.answer(scope.policy.budget_s + GRACE_S if scope.policy.wait else 0)
        try:
            flight.choice = self._measure(inv, candidates, scope)
        finally:
            with self._lock:
                del self._flights[key]
            flight.landed.set()
        return flight.choice

    def _measure(self, inv: Invocation, candidates: Sequence[Candidate], scope: Scope) -> Choice:
        assert inv.registry is not None
        chain, policy = inv.registry.policies(scope), scope.policy
        earlier = _earlier(chain, inv, scope)
        if earlier.is_busy:
            raise Unsupported("another process is measuring this; the heuristic is taken meanwhile")
        found = _found_meanwhile(inv, candidates, scope)
        if found is not None:
            announce(chain, Progress(inv, (), 0.0, policy.budget_s, finished=True))
            return found
        report = functools.partial(announce, chain)
        try:
            tuned = tune(inv, candidates, policy.budget_s, report=report, earlier=earlier.entries)
        except Exception:
            announce(chain, Progress(inv, (), 0.0, policy.budget_s, finished=True))  # nobody need wait for it
            raise
        if not tuned.records:
            # What was found out is nothing to go on from.
            announce(chain, Progress(inv, (), 0.0, policy.budget_s, finished=True))
            raise Unsupported(f"nothing could be measured:\n{tuned}")
        # Everybody is told before the others go on: whoever comes next finds it.
        choice = choice_of(tuned)
        inv.registry.learn(inv, choice, scope)
        return attrs.evolve(choice, measured=False)


def _earlier(chain: pluggy.PluginManager, inv: Invocation, scope: Scope) -> Earlier:
    try:
        return chain.hook.tuning_started(inv=inv, scope=scope) or Earlier()
    except Exception:  # what a store cannot tell is measured again
        return Earlier()


def _found_meanwhile(inv: Invocation, candidates: Sequence[Candidate], scope: Scope) -> Choice | None:
    """What a store has by now: another process may have been quicker."""
    assert inv.registry is not None
    quiet = attrs.evolve(scope, policy=attrs.evolve(scope.policy, mode="off"))
    choice, _ = first_answer(inv.registry.policies(quiet), inv, candidates, quiet)
    return choice if choice.record is not None else None


def choice_of(tuned: Tuned) -> Choice:
    """The winner of a contest that has one, as a policy says it."""
    record = tuned.records[0]
    return Choice(record.backend or "", record.cfg, "autotuned", tuned.keys[0], record, measured=True)


class _Flight:
    """A measurement under way."""

    def __init__(self) -> None:
        self.landed = threading.Event()
        self.choice: Choice | None = None

    def answer(self, seconds: float) -> Choice | None:
        """What was measured, once it was; None if it takes too long or nothing came of it."""
        if not self.landed.wait(seconds):
            raise Unsupported("another thread is measuring this; the heuristic is taken meanwhile")
        return self.choice


def announce(chain: pluggy.PluginManager, progress: Progress) -> None:
    """Tell who listens, and whoever sits at the terminal."""
    tell(chain, "tuning_progress", inv=progress.inv, progress=progress)
    show(progress, sys.stderr)


def show(progress: Progress, stream: Any) -> None:
    """The line, on a stream that is a terminal."""
    if stream is not None and stream.isatty():
        stream.write(f"\r\x1b[2K{str(progress)[:119]}" + ("\n" if progress.finished else ""))
        stream.flush()


#: The one of the process: what one registry measures, another need not measure at the same time.
TUNER = Tuner()
