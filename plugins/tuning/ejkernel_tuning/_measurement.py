"""A measurement: compile, check and time all variants within the budget, even if some of them fail or hang."""

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

from ejkernel_core import Invocation
from ejkernel_core.extend import Entry, LoadedKernel, Reason, Trial, text_of

from . import _load, _timing
from ._checks import fault_text, is_constant, memory_fault, results_fault
from ._in_place import InPlace, compile_in_place
from ._threads import Settings, StillRunningError, run_in_thread, start_thread

#: For each round: its share of the calls, and the multiple of the best time above which it excludes a variant.
ROUNDS = ((0.08, 1.6), (0.14, 1.3), (0.26, 1.15), (0.52, 1.08))
#: The same multiple after the first call of each variant, which excludes most of them.
FIRST_CALL_FACTOR = 3.0
#: The largest share of the remaining time for one run, so that a run that hangs leaves time for others.
RUN_SHARE = 0.25
#: The number of passes over all variants in a round.
PASSES = 4
#: The heuristic's configuration is selected unless another one is faster by more than this fraction.
MARGIN = 0.02
#: A run counts as hanging after this multiple of its expected time, plus the time for a profile on a GPU.
PATIENCE, PROFILE_S = 10.0, 3.0
#: A run is not said to hang after less than this. It may have been late for another reason, and is tried again.
HANG_S = 5.0
#: The share of the remaining time for compiling: first the first variants, and later all others.
COMPILING_SHARE = 0.6
#: The largest number of variants in a measurement, so that its record stays small. Variants that the budget does not
#: reach are counted up to this number, for at most this time.
MAX_VARIANTS, COUNTING_S = 2000, 1.0
#: The note of a measurement without a best variant, because of different results.
NO_WINNER = "results differ, and there is no reference to decide which are right: no configuration is selected"
#: The note of a measurement whose expected results a wrong kernel could have as well.
NOTHING_TO_SEE = "every expected result has one value alone, which proves nothing: no configuration is selected"
#: The time between two reports during long work.
REPORT_INTERVAL_S = 1.0


@attrs.define(eq=False)
class Variant:
    """One kernel with one configuration, and its results so far."""

    kernel: LoadedKernel
    cfg: Any
    #: Whether it is the heuristic's configuration, which is used without measuring.
    is_usual: bool = False
    compiled: Callable[..., Any] | None = None
    samples: list[float] = attrs.field(factory=list)
    #: The number of calls in one sample by the clock; 0 until it is known.
    calls_per_sample: int = 0
    #: Whether its time is that of an earlier, unfinished measurement.
    has_earlier_result: bool = False
    #: Whether its results were compared with those of the reference, now or earlier.
    is_checked: bool = False
    #: Whether a process crashed while it was tried. Another variant may have been the cause.
    may_crash: bool = False
    #: Why it is excluded, or None.
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
        """Its results so far."""
        # Cached until something changes, because every report reads the entries of all variants.
        state = len(self.samples), sum(self.samples), self.reason, self.is_checked
        if self._entry is None or self._entry[0] != state:
            milliseconds, spread = (self.milliseconds, self.spread) if self.samples else (None, None)
            reason = self.reason or ""
            self._entry = (
                state,
                Entry(self.backend, self.cfg, milliseconds, spread, reason, self.is_usual, self.is_checked),
            )
        return self._entry[1]


def _best_of(measured: list[Variant]) -> Variant:
    """The fastest one, or that of the heuristic where it is not slower by more than ``MARGIN``."""
    best = min(measured, key=lambda variant: variant.milliseconds)
    limit = best.milliseconds * (1 + MARGIN)
    return next((variant for variant in measured if variant.is_usual and variant.milliseconds <= limit), best)


@attrs.define(eq=False)
class _CompileQueue:
    """The variants to compile. Threads take the next one in turn."""

    variants: Iterator[Variant]
    #: The variants that are being compiled.
    compiling: set[Variant] = attrs.field(factory=set)
    #: Whether compilation has ended. A variant that comes later is not compiled.
    is_closed: bool = False
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    @contextlib.contextmanager
    def lock(self, until: float) -> Iterator[bool]:
        """Hold the lock in a ``with`` block. False if a thread in which a plugin hangs holds it until then."""
        if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
            yield False
            return
        try:
            yield True
        finally:
            self._lock.release()


@attrs.define(eq=False)
class Measurement:
    """The measurement of the variants of one invocation, on concrete inputs."""

    inv: Invocation
    #: The arrays by name.
    inputs: Mapping[str, jax.Array]
    #: The first variants; the others are added while there is time.
    variants: list[Variant]
    deadline: float
    #: The variant whose results are the expected ones. It may be one that is not measured.
    reference: Variant | None
    #: Called after every step, by one thread at a time.
    report: Callable[[], None]
    num_warmup: int
    num_iters: int
    #: All other variants; the next one is taken while there is time.
    others: Iterable[Variant] = ()
    #: The kernel whose results are the expected ones, and why if it is not the reference.
    expected_source: str = ""
    #: Whether to rank by bursts too, where samples are taken under load.
    has_burst_ranking: bool = False
    #: The results of that, the best one first.
    burst_ranking: tuple[Entry, ...] = ()
    #: Remarks for the report.
    notes: list[str] = attrs.field(factory=list)
    #: Whether there are more variants than could be counted.
    has_uncounted: bool = False
    #: The first variant that was left behind while running, and its thread.
    _stuck_run: tuple[Variant, threading.Thread] | None = None
    _expected: Any = None
    _has_no_reference: bool = False
    #: Whether the expected results tell nothing about a kernel.
    _is_constant: bool = False
    _crashed: list[Variant] = attrs.field(factory=list)
    _compile_threads: list[threading.Thread] = attrs.field(factory=list)
    #: By backend: the longest time that a variant of it took to compile.
    _compile_s: dict[str, float] = attrs.field(factory=dict)
    _has_compiled: bool = False
    _trials: dict[int, Trial] = attrs.field(factory=dict)
    _trial_numbers: Iterator[int] = attrs.field(factory=itertools.count)
    #: Protects what several threads change, and keeps reports in order.
    _lock: threading.RLock = attrs.field(factory=threading.RLock)
    _is_over: threading.Event = attrs.field(factory=threading.Event)
    #: Whether the samples of all variants are taken under load from now on, and in queues of how many seconds.
    _is_loaded: bool = False
    _queue_s: float = _load.QUEUE_S

    def run(self) -> Variant | None:
        """Compile, check and time the variants. Return the best one, or None where there is none."""
        try:
            # The heuristic and the reference come first, so that they are measured even if others fail or hang.
            may_reference_crash = self.reference is not None and self.reference.may_crash
            self._compile_and_check(self._first_variants(), 1 if may_reference_crash else None)
            self._compile_and_check(iter(self.others))
            self._measure_slowest_again()
            self._exclude_slower(FIRST_CALL_FACTOR)
            self._report()
            if self.has_burst_ranking and self._is_for_load():
                self._rank_bursts()
            self._run_rounds()
            if not self._is_loaded:
                self.burst_ranking = ()
            self._try_crashed()
            self._wait_for_compilations()
        finally:
            with self._lock:  # no reports after the end
                self._is_over.set()
            # The traceback of a kernel's exception, or a thread that was left behind, may keep this object.
            self.inputs, self._expected = {}, None
        return self._winner()

    def _wait_for_compilations(self) -> None:
        """Wait until the deadline for those that were left behind, which would slow down the program that goes on."""
        for thread in self._compile_threads:
            thread.join(max(0.0, self.deadline - time.monotonic()))

    def remaining_variants(self) -> list[Variant]:
        """The variants that are not excluded, without those that are tried last and have not been yet."""
        return [variant for variant in self.variants if variant.reason is None and not self._is_postponed(variant)]

    def _best_milliseconds(self) -> float:
        return min((variant.milliseconds for variant in self.remaining_variants()), default=math.inf)

    @property
    def trials(self) -> tuple[Trial, ...]:
        """What is compiled or run now."""
        with self._lock:
            return tuple(self._trials.values())

    def _first_variants(self) -> Iterator[Variant]:
        variants = list(self.variants)
        if self.reference is not None and self.reference not in variants:
            variants.append(self.reference)
        return iter(variants)

    def _compile_and_check(self, variants: Iterator[Variant], num_threads: int | None = None) -> None:
        self._compile(variants, num_threads or os.cpu_count() or 1)
        self._check()

    def _winner(self) -> Variant | None:
        measured = [variant for variant in self.remaining_variants() if variant.samples]
        # Without a reference, it is unknown which of several different results are right.
        is_disputed = self._has_no_reference and any((v.reason or "").startswith(Reason.WRONG) for v in self.variants)
        if is_disputed:
            self.notes.append(NO_WINNER)
        if self._is_constant:
            self.notes.append(NOTHING_TO_SEE)
        # Without its time, nothing is known to be faster than the heuristic's configuration.
        is_usual_unreached = any(v.is_usual and (v.reason or "").startswith(Reason.OUT_OF_TIME) for v in self.variants)
        if is_disputed or self._is_constant or is_usual_unreached or not measured:
            return None
        return _best_of(measured)

    # -- steps that may crash the process ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _trial(self, variant: Variant, step: str) -> Iterator[None]:
        """List a variant in ``trials`` while it is compiled or run, even in a thread that is left behind."""
        number = next(self._trial_numbers)
        with self._lock:
            self._trials[number] = Trial(variant.backend, variant.cfg, step)
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

    def _is_postponed(self, variant: Variant) -> bool:
        return variant in self._crashed

    def _try_crashed(self) -> None:
        """Try what may crash last and one at a time, so that the cause is known if the process crashes again."""
        is_any_remaining = False
        while self._crashed:
            variant = self._crashed.pop(0)
            if self._trials:
                variant.reason = (
                    f"{Reason.OUT_OF_TIME}: a process crashed while it was tried; {self.trials[0]} has not ended"
                )
                continue
            self._compile_and_check(iter([variant]), num_threads=1)
            is_any_remaining |= variant.reason is None
        if is_any_remaining:
            self._run_rounds()

    # -- compiling -----------------------------------------------------------------------------------------------

    def _compile(self, variants: Iterator[Variant], num_threads: int) -> None:
        until = time.monotonic() + COMPILING_SHARE * (self.deadline - time.monotonic())
        pending, settings = _CompileQueue(variants), Settings.of(self.inv)
        #: Each variant with its compiled function or exception; None when a thread ends.
        outcomes: queue.SimpleQueue[tuple[Variant | None, Any]] = queue.SimpleQueue()
        for _ in range(num_threads):
            work = functools.partial(self._compile_in_thread, pending, outcomes, until, settings)
            self._compile_threads.append(start_thread(work))
        num_running = num_threads
        while num_running and (seconds_left := self._end_of_compiling(until) - time.monotonic()) > 0:
            try:
                variant, outcome = outcomes.get(timeout=min(seconds_left, REPORT_INTERVAL_S))
            except queue.Empty:
                self._report()
                continue
            if variant is None:
                num_running -= 1
            else:
                self._set_compiled(variant, outcome, settings)
                pending.compiling.discard(variant)
        with self._lock:
            pending.is_closed = True
        for variant in pending.compiling:
            variant.reason = f"{Reason.OUT_OF_TIME}: not compiled within the budget; left behind in a thread"
        if num_running or len(self.variants) >= MAX_VARIANTS:
            self._count_rest(pending, settings)
        for variant in (*self.remaining_variants(), *([self.reference] if self.reference else [])):
            if variant.compiled is None:
                self._add_unreached(variant)

    def _end_of_compiling(self, until: float) -> float:
        """When compilation ends: at the deadline if nothing is compiled yet, because there is nothing to run."""
        return until if self._has_compiled else self.deadline

    def _set_compiled(self, variant: Variant, outcome: Any, settings: Settings) -> None:
        if isinstance(outcome, BaseException):
            variant.reason = fault_text("compiling", outcome)
            return
        self._has_compiled = True
        variant.compiled, variant.reason = outcome, memory_fault(outcome, settings.device)

    def _compile_in_thread(self, pending: _CompileQueue, outcomes: Any, until: float, settings: Settings) -> None:
        with settings.in_effect():
            while (variant := self._next(pending, until)) is not None:
                try:
                    with self._trial(variant, "compiling"):
                        compiled = self._compile_one(variant)
                    outcomes.put((variant, compiled))
                except BaseException as fault:  # any exception excludes only this variant
                    outcomes.put((variant, fault))
        outcomes.put((None, None))

    def _compile_one(self, variant: Variant) -> Any:
        avals = {name: jax.ShapeDtypeStruct(v.shape, v.dtype) for name, v in self.inputs.items()}
        start = time.monotonic()
        compiled = compile_in_place(self.inv.operation, self._function(variant), avals)
        self._compile_s[variant.backend] = max(time.monotonic() - start, self._compile_s.get(variant.backend, 0.0))
        return compiled

    def _next(self, pending: _CompileQueue, until: float) -> Variant | None:
        """The next variant to compile; None if there are no more, or no time is left."""
        with pending.lock(self._end_of_compiling(until)) as has_lock:
            while has_lock and len(self.variants) < MAX_VARIANTS:
                if self._is_over.is_set() or time.monotonic() >= self._end_of_compiling(until):
                    return None
                variant = next(pending.variants, None)
                if variant is None:
                    return None
                if not self._has_time_for(variant, until):
                    self._add_unreached(variant)
                elif self._add_to_compile(variant, pending):
                    return variant
        return None

    def _has_time_for(self, variant: Variant, until: float) -> bool:
        """Whether it is likely to be compiled in time. If not, it would be left behind in a thread."""
        return time.monotonic() + self._compile_s.get(variant.backend, 0.0) < self._end_of_compiling(until)

    def _add_to_compile(self, variant: Variant, pending: _CompileQueue) -> bool:
        with self._lock:
            if pending.is_closed:  # it took too long to make this variant
                self._add_unreached(variant)
                return False
            self._add(variant)
            if self._is_postponed(variant) or variant.has_earlier_result or variant.reason is not None:
                return False
            pending.compiling.add(variant)
            return True

    def _add(self, variant: Variant) -> None:
        if variant is self.reference:
            return
        if variant not in self.variants:
            self.variants.append(variant)
        if variant.may_crash and variant.reason is None:
            variant.may_crash = False
            self._crashed.append(variant)

    def _add_unreached(self, variant: Variant) -> None:
        if variant not in self.variants and variant is not self.reference:
            self.variants.append(variant)
        if not variant.has_earlier_result and variant.reason is None:
            variant.reason = f"{Reason.OUT_OF_TIME}: not reached within the budget"

    def _count_rest(self, pending: _CompileQueue, settings: Settings) -> None:
        """Add the variants for which no time was left, as far as they can be counted quickly."""
        until = time.monotonic() + COUNTING_S

        def count() -> bool:
            with pending.lock(until) as has_lock:
                while has_lock and len(self.variants) < MAX_VARIANTS and time.monotonic() < until:
                    variant = next(pending.variants, None)
                    if variant is None:
                        return True
                    self._add_unreached(variant)
            return False

        with contextlib.suppress(StillRunningError):
            if run_in_thread(count, COUNTING_S, settings):
                return
        self.has_uncounted = True

    def _function(self, variant: Variant) -> Callable[..., Any]:
        def run(*arrays: Any) -> tuple[Any, ...]:
            inv = self.inv.with_arrays(dict(zip(self.inputs, arrays, strict=True)))
            return variant.kernel.run_backend(inv, variant.cfg)

        return run

    # -- checking ------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        for variant in self.remaining_variants():
            if variant.compiled is None or variant.samples:
                continue
            self._check_results(variant)
            for _ in range(1, self.num_warmup):
                if variant.reason is None:
                    self._attempt(variant, "running", functools.partial(self._results, variant))
            if variant.reason is None:
                self._measure(variant, 1)

    def _check_results(self, variant: Variant) -> None:
        """Compare its results with the expected ones. They can be large, and are gone before the next variant runs."""
        results = self._attempt(variant, "running", functools.partial(self._results, variant))
        if results is None:
            return
        if self._expected is None:
            self._expected = expected = self._expected_results(variant, results)
            # Outside of the trace that the call may be in, as all work of an attempt is.
            self._is_constant = bool(self._attempt(variant, "checking", lambda: all(map(is_constant, expected))))
        check = functools.partial(results_fault, results, self._expected, self.inv)
        outcome = self._attempt(variant, "checking", lambda: (check(),))
        if outcome is not None:
            variant.reason, variant.is_checked = outcome[0], not (self._has_no_reference or self._is_constant)

    def _measure_slowest_again(self) -> None:
        """Measure the slowest variants again at the end, because a thread that was left behind may have slowed them."""
        best = self._best_milliseconds()
        for variant in self.remaining_variants():
            first_samples, is_over = variant.samples, time.monotonic() >= self.deadline
            is_slow = variant.milliseconds > FIRST_CALL_FACTOR * best
            if first_samples and is_slow and not (is_over or variant.has_earlier_result):
                variant.samples = []  # no expected time, so that a late run excludes only this variant
                self._measure(variant, 1)
                variant.samples = [min(first_samples + variant.samples)]

    def _expected_results(self, first: Variant, results: Any) -> Any:
        """The results of the reference, or of the first variant where the reference has none; and their source."""
        self.expected_source = first.kernel.name
        if self.reference is first:
            return results
        if self.reference is None:
            self._has_no_reference = True
            self.expected_source += ", because there is no reference"
            return results
        expected = None
        if self.reference.reason is None:
            run = functools.partial(self._results, self.reference)
            expected = self._attempt(self.reference, "running", run, 2 * RUN_SHARE)
        if expected is not None:
            self.expected_source = self.reference.kernel.name
            return expected
        self._has_no_reference = True
        self.expected_source += f", because {self.reference.kernel.name}: {self.reference.reason}"
        return results

    def _results(self, variant: Variant) -> Any:
        assert variant.compiled is not None
        return jax.block_until_ready(variant.compiled(*self.inputs.values()))

    # -- timing --------------------------------------------------------------------------------------------------

    def _run_rounds(self) -> None:
        self._begin_load()
        self._measure_in_rounds()

    def _measure_in_rounds(self) -> None:
        for share, factor in ROUNDS:
            calls, self._queue_s = max(1, round(share * self.num_iters)), _load.queue_s(share)
            if len(self.remaining_variants()) < 2 and any(variant.samples for variant in self.remaining_variants()):
                return
            # In several passes, so that a temporary slowdown of the machine affects all variants.
            calls_per_pass = math.ceil(calls / PASSES)
            for _ in range(math.ceil(calls / calls_per_pass)):
                for variant in self.remaining_variants():
                    if not variant.has_earlier_result:
                        self._measure(variant, calls_per_pass)
            self._exclude_slower(factor)
            self._report()

    def _exclude_slower(self, factor: float) -> None:
        best = self._best_milliseconds()
        for variant in self.remaining_variants():
            if variant.samples and not variant.is_usual and variant.milliseconds > factor * best:
                variant.reason = f"{Reason.SLOWER}: {variant.milliseconds:.4g} ms"

    # -- under load ----------------------------------------------------------------------------------------------

    def _is_for_load(self) -> bool:
        """Whether the calls are long enough, and there are several to compare."""
        variants, is_long = self.remaining_variants(), self._best_milliseconds() >= _load.SHORTEST_MS
        has_new = any(not variant.has_earlier_result for variant in variants)
        return _load.is_possible(self.inv.platform) and is_long and has_new and len(variants) > 1

    def _begin_load(self) -> None:
        """Have all samples of all variants taken under load from now on, after warm work. They stay bursts if one of
        the variants cannot be timed so.
        """
        if self._is_loaded or not self._is_for_load():
            return
        self._queue_s = _load.QUEUE_S
        until = time.monotonic() + min(_load.WARM_S, _load.WARM_SHARE * (self.deadline - time.monotonic()))
        while time.monotonic() < until:
            self._sample_each_under_load()
        samples = self._sample_each_under_load()
        if all(samples[variant] for variant in samples if variant.reason is None):
            self._is_loaded = True
            for variant, loaded in samples.items():
                variant.samples = loaded or variant.samples
            self.notes.append("measured under load: each configuration after the others, without a pause")

    def _sample_each_under_load(self) -> dict[Variant, list[float]]:
        variants = [variant for variant in self.remaining_variants() if not variant.has_earlier_result]
        return {variant: self._sample_under_load(variant) for variant in variants}

    def _sample_under_load(self, variant: Variant) -> list[float]:
        milliseconds, queue_s = variant.milliseconds, self._queue_s
        expected_s = sum(_load.calls_of(milliseconds, queue_s)) * milliseconds * 1e-3
        take = functools.partial(_load.sample, milliseconds=milliseconds, seconds=queue_s)
        return self._attempt(variant, "measuring", self._sampling(variant, take), expected_s=expected_s) or []

    def _rank_bursts(self) -> None:
        """Rank by bursts first, for a comparison. Those that are slower then are measured again under load."""
        variants = self.remaining_variants()
        self._measure_in_rounds()
        measured = [variant for variant in self.remaining_variants() if variant.samples]
        if measured:
            best = _best_of(measured)
            ranked = sorted(variants, key=lambda v: (v is not best, v.reason is not None, v.milliseconds))
            self.burst_ranking = tuple(variant.entry for variant in ranked)
        for variant in variants:
            if (variant.reason or "").startswith(Reason.SLOWER):
                variant.reason = None

    # -- one variant ---------------------------------------------------------------------------------------------

    def _sampling(self, variant: Variant, take: Callable[[Any, list[Any]], list[float]]) -> Callable[[], list[float]]:
        """Takes samples of a variant; of one that updates arrays, on copies of them."""
        compiled, arrays = variant.compiled, list(self.inputs.values())
        assert compiled is not None

        def work() -> list[float]:
            if not isinstance(compiled, InPlace):
                return take(compiled, arrays)
            compiled.begin(arrays)
            try:
                return take(compiled, arrays)
            finally:
                compiled.end()

        return work

    def _measure(self, variant: Variant, calls: int) -> None:
        if self._is_loaded and variant.samples:
            variant.samples += self._sample_under_load(variant)
            return

        def bursts(compiled: Any, arrays: list[Any]) -> list[float]:
            if self.inv.platform == "gpu" and (times := _timing.on_device(compiled, arrays, calls, self.deadline)):
                return times
            if not variant.calls_per_sample:
                variant.calls_per_sample = _timing.batch_size(compiled, arrays)
            return [_timing.seconds(compiled, arrays, variant.calls_per_sample) * 1e3 for _ in range(calls)]

        expected_s = calls * max(1, variant.calls_per_sample) * variant.milliseconds * 1e-3 if variant.samples else 0.0
        work = self._sampling(variant, bursts)
        variant.samples += self._attempt(variant, "measuring", work, expected_s=expected_s) or []

    def _attempt(
        self, variant: Variant, step: str, work: Callable[[], Any], share: float = RUN_SHARE, expected_s: float = 0.0
    ) -> Any:
        """Run ``work`` in a thread and return its result. Where it fails or is late, return None and exclude the
        variant.

        ``expected_s`` is the time that earlier samples predict. Where the time limit was too short for it, the variant
        is not excluded, but the whole measurement ends.
        """
        limit_s = share * (self.deadline - time.monotonic())
        if limit_s <= 0:
            if not variant.samples:
                variant.reason = f"{Reason.OUT_OF_TIME}: the budget was spent"
            return None
        try:
            return run_in_thread(
                functools.partial(self._run_trial, variant, step, work), limit_s, Settings.of(self.inv)
            )
        except StillRunningError as fault:
            reason = f"still {step} after {limit_s:.2g} s; left behind in a thread{self._blocker(variant, fault)}"
            profile_s = PROFILE_S if self.inv.platform == "gpu" else 0.0
            if expected_s and limit_s < PATIENCE * expected_s + profile_s:
                self.deadline = time.monotonic()
                self.notes.append(f"ended early: {variant.backend} {text_of(variant.cfg)} was {reason}")
            else:
                is_blocked = step == "checking" or self._stuck_run != (variant, fault.thread)
                hangs_after_s = max(HANG_S, PATIENCE * self._best_milliseconds() * 1e-3 + profile_s)
                variant.reason = (
                    f"{Reason.OUT_OF_TIME if is_blocked or limit_s < hangs_after_s else Reason.HUNG}: {reason}"
                )
        except Exception as fault:  # excludes only this variant
            variant.reason = fault_text(step, fault)
        return None

    def _run_trial(self, variant: Variant, step: str, work: Callable[[], Any]) -> Any:
        if step == "checking":  # which runs no code of the variant
            return work()
        with self._trial(variant, "running"):
            return work()

    def _blocker(self, variant: Variant, fault: StillRunningError) -> str:
        """The last part of a reason: which earlier variant is still running and probably blocks the device."""
        if self._stuck_run is None or not self._stuck_run[1].is_alive():
            self._stuck_run = variant, fault.thread
            return ""
        first, _ = self._stuck_run
        return f", probably blocked by {first.backend} {text_of(first.cfg)}"
