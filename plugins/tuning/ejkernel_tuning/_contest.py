"""The contest: every configuration is compiled, checked and measured, none of them can do harm, and time is kept."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import jax

from ejkernel_core._kernel import Invocation, LoadedKernel
from ejkernel_core._measurement import OUT_OF_TIME, Entry, Trial

from . import _timing
from ._judging import fault_text, too_large, wrong
from ._threads import Settings, StillRunningError, in_thread, started

#: The rounds: which part of the calls is measured, and over which multiple of the best time a configuration is out.
ROUNDS = ((0.08, 1.6), (0.14, 1.3), (0.26, 1.15), (0.52, 1.08))
#: And after the first call, when most are out.
HOPELESS = 3.0
#: No single run gets more than this part of the time that is left: one that hangs must not cost the others theirs.
SHARE = 0.25
#: A round is run in so many turns.
TURNS = 4
#: A configuration has to beat the heuristic's by this much: otherwise there is no reason to leave it.
MARGIN = 0.02
#: How many times as long as it takes a measurement may last before it is a hang; and what a profile takes beside.
PATIENCE, PROFILE_S = 10.0, 3.0
#: The part of the budget in which everything has to be compiled; of what is left of it, after the first.
COMPILING = 0.6
#: More configurations than that nobody measures, and a record of them could not be kept. What the budget did not reach
#: is counted up to there, for so long.
MOST, COUNTING_S = 2000, 1.0
#: Whatever takes long, it is reported that often that it does.
SIGN_OF_LIFE_S = 1.0


@attrs.define(eq=False)
class Entrant:
    """One configuration of one kernel, and what became of it."""

    kernel: LoadedKernel
    cfg: Any
    #: The configuration that would be taken without measuring.
    is_usual: bool = False
    compiled: Callable[..., Any] | None = None
    samples: list[float] = attrs.field(factory=list)
    #: How many calls make one sample by the clock.
    batch: int = 0
    #: It was compiled, checked and measured before, by somebody who was interrupted.
    is_settled: bool = False
    #: Its results were compared with those of the reference, now or then.
    is_checked: bool = False
    #: A process died while this one was tried, perhaps because of another that was tried beside it.
    is_suspect: bool = False
    #: Why it is out, or None.
    reason: str | None = None
    _entry: tuple[Any, Entry] | None = None

    @property
    def backend(self) -> str:
        return self.kernel.backend

    @property
    def milliseconds(self) -> float:
        return statistics.median(self.samples) if self.samples else math.inf

    @property
    def spread(self) -> float:
        return _timing.Timing(self.samples, "").spread if self.samples else 0.0

    @property
    def entry(self) -> Entry:
        """What became of it so far."""
        # The same object until something changes: this is asked for at every step of a contest of hundreds.
        state = len(self.samples), sum(self.samples), self.reason, self.is_checked
        if self._entry is None or self._entry[0] != state:
            milliseconds, spread = (self.milliseconds, self.spread) if self.samples else (None, None)
            reason = self.reason or ""
            self._entry = (
                state,
                Entry(self.backend, self.cfg, milliseconds, spread, reason, self.is_usual, self.is_checked),
            )
        return self._entry[1]


@attrs.define(eq=False)
class _Intake:
    """Where those come from that are to be compiled, one thread at a time."""

    source: Iterator[Entrant]
    #: Those that a thread compiles.
    missing: set[Entrant] = attrs.field(factory=set)
    #: Nobody waits for what is compiled any longer.
    is_closed: bool = False
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    @contextlib.contextmanager
    def taken(self, until: float) -> Iterator[bool]:
        """Whether it is this thread's turn: not where a plugin hangs in another's."""
        if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
            yield False
            return
        try:
            yield True
        finally:
            self._lock.release()


@attrs.define(eq=False)
class Contest:
    """The entrants of one invocation, on concrete inputs."""

    inv: Invocation
    #: The arrays by name.
    inputs: Mapping[str, jax.Array]
    #: Those that come first; the others join them.
    entrants: list[Entrant]
    deadline: float
    #: What computes the results to compare with: one of the entrants, or one beside them.
    judge: Entrant | None
    #: Called at every step, by one thread at a time.
    report: Callable[[], None]
    num_warmup: int
    num_iters: int
    #: Asked for the next one whenever there is time for one more.
    others: Iterable[Entrant] = ()
    #: Whose results the others were compared with, and why not the reference's; what is still to be said.
    checked_against: str = ""
    notes: list[str] = attrs.field(factory=list)
    #: There are more configurations than could be counted.
    has_uncounted: bool = False
    #: The first that was left behind while it ran, and has not come back.
    _lost: tuple[Entrant, threading.Thread] | None = None
    _wanted: Any = None
    _is_unreferenced: bool = False
    _suspects: list[Entrant] = attrs.field(factory=list)
    _has_compiled: bool = False
    _trials: dict[int, Trial] = attrs.field(factory=dict)
    _numbers: Iterator[int] = attrs.field(factory=itertools.count)
    #: For what threads change, and for reports: what is reported last is what holds.
    _lock: threading.RLock = attrs.field(factory=threading.RLock)
    _is_over: threading.Event = attrs.field(factory=threading.Event)

    def run(self) -> Entrant | None:
        """Compile, check, race. The winner, or None where nobody got as far as being measured."""
        try:
            # The heuristic's and the reference have been measured whatever comes of the others, and however many.
            alone = self.judge is not None and self.judge.is_suspect
            self._let_in(self._first(), 1 if alone else None)
            self._let_in(iter(self.others))
            self._measure_hopeless_again()
            self._drop_slower(HOPELESS)
            self._report()
            self._race()
            self._try_suspects()
        finally:
            with self._lock:  # so that nothing is reported after the end
                self._is_over.set()
        return self._winner()

    def alive(self) -> list[Entrant]:
        """Those that are still in."""
        return [entrant for entrant in self.entrants if entrant.reason is None and not self._is_waiting(entrant)]

    @property
    def trials(self) -> tuple[Trial, ...]:
        """What is compiled or run at this moment."""
        with self._lock:
            return tuple(self._trials.values())

    def _first(self) -> Iterator[Entrant]:
        first = list(self.entrants)
        return iter(first if self.judge is None or self.judge in first else [*first, self.judge])

    def _let_in(self, source: Iterator[Entrant], threads: int | None = None) -> None:
        self._compile(source, threads or os.cpu_count() or 1)
        self._check()

    def _winner(self) -> Entrant | None:
        measured = [entrant for entrant in self.alive() if entrant.samples]
        # Without the reference, and where they differ, nobody knows who is right.
        is_disputed = self._is_unreferenced and any((e.reason or "").startswith("wrong") for e in self.entrants)
        if is_disputed:
            self.notes.append("results differ, and no reference could say which are right: nobody wins")
        if is_disputed or not measured:
            return None
        best = min(measured, key=lambda entrant: entrant.milliseconds)
        close = (e for e in measured if e.is_usual and e.milliseconds <= best.milliseconds * (1 + MARGIN))
        return next(close, best)

    # -- what may take the process with it ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _trying(self, entrant: Entrant, step: str) -> Iterator[None]:
        """Everybody is told before, in the thread that does it: what is left behind there is still being tried."""
        number = next(self._numbers)
        with self._lock:
            self._trials[number] = Trial(entrant.backend, entrant.cfg, step)
            if not self._is_over.is_set():
                self.report()
        try:
            yield
        finally:
            with self._lock:
                del self._trials[number]
                if not self._is_over.is_set():
                    self.report()

    def _report(self) -> None:
        with self._lock:
            self.report()

    def _is_waiting(self, entrant: Entrant) -> bool:
        return entrant in self._suspects

    def _try_suspects(self) -> None:
        """At last and one by one: should the process die again, it is known of which."""
        is_any_in = False
        while self._suspects:
            entrant = self._suspects.pop(0)
            if self._trials:
                entrant.reason = f"{OUT_OF_TIME}: a process died at it before, and {self.trials[0]} was left behind"
                continue
            self._let_in(iter([entrant]), threads=1)
            is_any_in |= entrant.reason is None
        if is_any_in:
            self._race()

    # -- compiling -----------------------------------------------------------------------------------------------

    def _compile(self, source: Iterator[Entrant], count: int) -> None:
        until = time.monotonic() + COMPILING * (self.deadline - time.monotonic())
        intake, settings = _Intake(source), Settings.of(self.inv)
        done: queue.SimpleQueue[tuple[Entrant | None, Any]] = queue.SimpleQueue()
        for _ in range(count):
            started(functools.partial(self._compile_all, intake, done, until, settings))
        at_work = count
        while at_work and (left := self._end_of_compiling(until) - time.monotonic()) > 0:
            try:
                entrant, outcome = done.get(timeout=min(left, SIGN_OF_LIFE_S))
            except queue.Empty:
                self._report()
                continue
            if entrant is None:
                at_work -= 1
            else:
                self._settle_compiled(entrant, outcome, settings)
                intake.missing.discard(entrant)
        with self._lock:
            intake.is_closed = True
        for entrant in intake.missing:
            entrant.reason = f"{OUT_OF_TIME}: not compiled within the budget; left behind in a thread"
        if at_work or len(self.entrants) >= MOST:
            self._count_rest(intake, settings)
        for entrant in (*self.alive(), *([self.judge] if self.judge else [])):
            if entrant.compiled is None:
                self._enter_unreached(entrant)

    def _end_of_compiling(self, until: float) -> float:
        """As long as there is nothing to run, there is nothing better to do than to wait."""
        return until if self._has_compiled else self.deadline

    def _settle_compiled(self, entrant: Entrant, outcome: Any, settings: Settings) -> None:
        if isinstance(outcome, BaseException):
            entrant.reason = fault_text("compiling", outcome)
            return
        self._has_compiled = True
        entrant.compiled, entrant.reason = outcome, too_large(outcome, settings.device)

    def _compile_all(self, intake: _Intake, done: Any, until: float, settings: Settings) -> None:
        with settings.in_effect():
            while (entrant := self._next(intake, until)) is not None:
                try:
                    with self._trying(entrant, "compiling"):
                        compiled = self._compiled(entrant)
                    done.put((entrant, compiled))
                except BaseException as fault:  # whatever a configuration does, it is only this one that is out
                    done.put((entrant, fault))
        done.put((None, None))

    def _compiled(self, entrant: Entrant) -> Any:
        avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self.inputs.values()]
        return jax.jit(self._function(entrant)).lower(*avals).compile()

    def _next(self, intake: _Intake, until: float) -> Entrant | None:
        """The next one to compile, while there is time."""
        with intake.taken(self._end_of_compiling(until)) as is_mine:
            while is_mine and len(self.entrants) < MOST:
                if self._is_over.is_set() or time.monotonic() >= self._end_of_compiling(until):
                    return None
                entrant = next(intake.source, None)
                if entrant is None or self._is_to_compile(entrant, intake):
                    return entrant
        return None

    def _is_to_compile(self, entrant: Entrant, intake: _Intake) -> bool:
        with self._lock:
            if intake.is_closed:  # asking for it took too long
                self._enter_unreached(entrant)
                return False
            self._enter(entrant)
            if self._is_waiting(entrant) or entrant.is_settled or entrant.reason is not None:
                return False
            intake.missing.add(entrant)
            return True

    def _enter(self, entrant: Entrant) -> None:
        if entrant is self.judge:
            return
        if entrant not in self.entrants:
            self.entrants.append(entrant)
        if entrant.is_suspect and entrant.reason is None:
            entrant.is_suspect = False
            self._suspects.append(entrant)

    def _enter_unreached(self, entrant: Entrant) -> None:
        if entrant not in self.entrants and entrant is not self.judge:
            self.entrants.append(entrant)
        if not entrant.is_settled and entrant.reason is None:
            entrant.reason = f"{OUT_OF_TIME}: not reached within the budget"

    def _count_rest(self, intake: _Intake, settings: Settings) -> None:
        """Enter those that there was no time for, as far as they can be had at once."""
        until = time.monotonic() + COUNTING_S

        def count() -> bool:
            with intake.taken(until) as is_mine:
                while is_mine and len(self.entrants) < MOST and time.monotonic() < until:
                    entrant = next(intake.source, None)
                    if entrant is None:
                        return True
                    self._enter_unreached(entrant)
            return False

        with contextlib.suppress(StillRunningError):
            if in_thread(count, COUNTING_S, settings):
                return
        self.has_uncounted = True

    def _function(self, entrant: Entrant) -> Callable[..., Any]:
        def run(*arrays: Any) -> tuple[Any, ...]:
            inv = self.inv.with_arrays(dict(zip(self.inputs, arrays, strict=True)))
            return entrant.kernel.run_backend(inv, entrant.cfg)

        return run

    # -- checking ------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        for entrant in self.alive():
            if entrant.compiled is None or entrant.samples:
                continue
            results = self._attempt(entrant, "running", functools.partial(self._results, entrant))
            if results is None:
                continue
            for _ in range(1, self.num_warmup):
                self._attempt(entrant, "running", functools.partial(self._results, entrant))
            if self._wanted is None:
                self._settle_reference(entrant, results)
            judge = functools.partial(wrong, results, self._wanted, self.inv.platform)
            verdict = self._attempt(entrant, "checking", lambda judge=judge: (judge(),))  # type: ignore[misc]
            if verdict is None:
                continue
            entrant.reason, entrant.is_checked = verdict[0], not self._is_unreferenced
            if entrant.reason is None:
                self._measure(entrant, 1)

    def _measure_hopeless_again(self) -> None:
        """After all others: what was left behind in a thread may have had the device, and is perhaps done by now."""
        best = min((entrant.milliseconds for entrant in self.alive()), default=math.inf)
        for entrant in self.alive():
            first, is_over = entrant.samples, time.monotonic() >= self.deadline
            if first and not (is_over or entrant.is_settled) and entrant.milliseconds > HOPELESS * best:
                entrant.samples = []  # as if for the first time: whoever is late is out, and the contest goes on
                self._measure(entrant, 1)
                entrant.samples = [min(first + entrant.samples)]

    def _settle_reference(self, first: Entrant, results: Any) -> None:
        """The reference's results; those of the first entrant where the reference cannot give any."""
        self._wanted, self.checked_against = results, first.kernel.name
        if self.judge is first:
            return
        if self.judge is None:
            self._is_unreferenced = True
            self.checked_against += ", because there is no reference"
            return
        wanted = None
        if self.judge.reason is None:
            wanted = self._attempt(self.judge, "running", functools.partial(self._results, self.judge), 2 * SHARE)
        if wanted is not None:
            self._wanted, self.checked_against = wanted, self.judge.kernel.name
        else:
            self._is_unreferenced = True
            self.checked_against += f", because {self.judge.kernel.name}: {self.judge.reason}"

    def _results(self, entrant: Entrant) -> Any:
        assert entrant.compiled is not None
        return jax.block_until_ready(entrant.compiled(*self.inputs.values()))

    # -- racing --------------------------------------------------------------------------------------------------

    def _race(self) -> None:
        for part, factor in ROUNDS:
            calls = max(1, round(part * self.num_iters))
            if len(self.alive()) < 2 and any(entrant.samples for entrant in self.alive()):
                return
            # In turns: what slows the machine down for a while slows everybody down.
            chunk = math.ceil(calls / TURNS)
            for _ in range(math.ceil(calls / chunk)):
                for entrant in self.alive():
                    if not entrant.is_settled:
                        self._measure(entrant, chunk)
            self._drop_slower(factor)
            self._report()

    def _drop_slower(self, factor: float) -> None:
        best = min((entrant.milliseconds for entrant in self.alive()), default=math.inf)
        for entrant in self.alive():
            if entrant.samples and not entrant.is_usual and entrant.milliseconds > factor * best:
                entrant.reason = f"slower: {entrant.milliseconds:.4g} ms"

    def _measure(self, entrant: Entrant, calls: int) -> None:
        compiled, arrays = entrant.compiled, list(self.inputs.values())
        assert compiled is not None

        def work() -> list[float]:
            if self.inv.platform == "gpu" and (samples := _timing.on_device(compiled, arrays, calls, self.deadline)):
                return samples
            if not entrant.batch:
                entrant.batch = _timing.batch_size(compiled, arrays)
            return [_timing.seconds(compiled, arrays, entrant.batch) * 1e3 for _ in range(calls)]

        takes = calls * max(1, entrant.batch) * entrant.milliseconds * 1e-3 if entrant.samples else 0.0
        entrant.samples += self._attempt(entrant, "measuring", work, takes=takes) or []

    def _attempt(
        self, entrant: Entrant, doing: str, work: Callable[[], Any], share: float = SHARE, takes: float = 0.0
    ) -> Any:
        """What ``work`` returns; None where it fails or takes longer than there is. Then the entrant is out; but not if
        it ``takes`` about as many seconds as there are, by what was measured before: then the contest is over, because
        the device is busy with what was left behind.
        """
        left = self.deadline - time.monotonic()
        if left <= 0:
            if not entrant.samples:
                entrant.reason = f"{OUT_OF_TIME}: the budget was spent"
            return None
        try:
            return in_thread(functools.partial(self._tried, entrant, doing, work), left * share, Settings.of(self.inv))
        except StillRunningError as fault:
            late = f"still {doing} after {left * share:.2g} s; left behind in a thread{self._behind(entrant, fault)}"
            if takes and left * share < PATIENCE * takes + (PROFILE_S if self.inv.platform == "gpu" else 0.0):
                self.deadline = time.monotonic()
                self.notes.append(f"ended early: {entrant.backend} {entrant.cfg} was {late}")
            else:
                entrant.reason = f"{OUT_OF_TIME}: {late}"
        except Exception as fault:  # as above
            entrant.reason = fault_text(doing, fault)
        return None

    def _tried(self, entrant: Entrant, doing: str, work: Callable[[], Any]) -> Any:
        if doing == "checking":  # whatever comes of that, it is not the configuration's doing
            return work()
        with self._trying(entrant, "running"):
            return work()

    def _behind(self, entrant: Entrant, fault: StillRunningError) -> str:
        """Who has kept the device, for all that is known: it does one thing at a time, and others wait."""
        if self._lost is None or not self._lost[1].is_alive():
            self._lost = entrant, fault.thread
            return ""
        first, _ = self._lost
        return f", behind {first.backend} {first.cfg}"
