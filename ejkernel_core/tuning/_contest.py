"""The contest: every configuration is compiled, checked and measured, none of them can do harm, and time is kept."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from ejkernel_core._errors import Unsupported
from ejkernel_core._invocation import Invocation
from ejkernel_core._kernel import LoadedKernel

from . import _timing

#: How far results may be from the reference's, over the largest of these, by dtype. A GPU or a TPU multiplies float32
#: in fewer bits unless it is told otherwise.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
DEVICE_FLOAT32 = 5e-3

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
#: How the reasons begin that say nothing about the configuration.
OUT_OF_TIME = "out of time"
#: The part of the budget in which everything has to be compiled.
COMPILING = 0.6


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
    #: Why it is out, or None.
    reason: str | None = None

    @property
    def backend(self) -> str:
        return self.kernel.backend

    @property
    def milliseconds(self) -> float:
        return statistics.median(self.samples) if self.samples else math.inf

    @property
    def spread(self) -> float:
        return _timing.Timing(self.samples, "").spread if self.samples else 0.0


class StillRunningError(Exception):
    """What cannot be interrupted was left behind, in this thread."""

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__(thread)
        self.thread = thread


@attrs.define(eq=False)
class Contest:
    """The entrants of one invocation, on concrete inputs."""

    inv: Invocation
    #: The arrays by name.
    inputs: Mapping[str, jax.Array]
    entrants: list[Entrant]
    deadline: float
    #: What computes the results to compare with.
    reference: LoadedKernel | None
    report: Callable[[], None]
    num_warmup: int
    num_iters: int
    #: Whose results the others were compared with, and why not the reference's; what is still to be said.
    checked_against: str = ""
    notes: list[str] = attrs.field(factory=list)
    #: The first that was left behind while it ran, and has not come back.
    _lost: tuple[Entrant, threading.Thread] | None = None
    _wanted: Any = None
    _is_unreferenced: bool = False

    def run(self) -> Entrant | None:
        """Compile, check, race. The winner, or None where nobody got as far as being measured."""
        started = time.monotonic()
        self._compile(started + COMPILING * (self.deadline - started))
        self._check()
        self._race()
        measured = [entrant for entrant in self.alive() if entrant.samples]
        # Without the reference, and where they differ, nobody knows who is right.
        is_disputed = self._is_unreferenced and any((e.reason or "").startswith("wrong") for e in self.entrants)
        if is_disputed:
            self.notes.append("results differ, and the reference could not say which are right: nobody wins")
        if is_disputed or not measured:
            return None
        best = min(measured, key=lambda entrant: entrant.milliseconds)
        close = (e for e in measured if e.is_usual and e.milliseconds <= best.milliseconds * (1 + MARGIN))
        return next(close, best)

    def alive(self) -> list[Entrant]:
        """Those that are still in."""
        return [entrant for entrant in self.entrants if entrant.reason is None]

    # -- compiling -----------------------------------------------------------------------------------------------

    def _compile(self, until: float) -> None:
        waiting: queue.SimpleQueue[Entrant] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[Entrant, Any]] = queue.SimpleQueue()
        to_do = [entrant for entrant in self.alive() if not entrant.is_settled]
        for entrant in to_do:
            waiting.put(entrant)
        settings = Settings.of(self.inv)
        work = (self._compile_all, (waiting, done, until, settings))
        threads = [threading.Thread(target=work[0], args=work[1], daemon=True) for _ in range(os.cpu_count() or 1)]
        for thread in threads[: waiting.qsize()]:
            thread.start()
        missing = {id(entrant): entrant for entrant in to_do}
        while missing and (left := until - time.monotonic()) > 0:
            try:
                entrant, outcome = done.get(timeout=left)
            except queue.Empty:
                break
            del missing[id(entrant)]
            if isinstance(outcome, BaseException):
                entrant.reason = _told("compiling", outcome)
            else:
                entrant.compiled, entrant.reason = outcome, _too_large(outcome, settings.device)
            self.report()
        for entrant in missing.values():
            entrant.reason = f"{OUT_OF_TIME}: not compiled within the budget; left behind in a thread"
        _left_behind.extend(thread for thread in threads if thread.is_alive())

    def _compile_all(self, waiting: Any, done: Any, until: float, settings: Settings) -> None:
        while time.monotonic() < until:
            try:
                entrant = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                with settings.entered():
                    avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self.inputs.values()]
                    done.put((entrant, jax.jit(self._function(entrant)).lower(*avals).compile()))
            except BaseException as fault:  # whatever a configuration does, it is only this one that is out
                done.put((entrant, fault))

    def _function(self, entrant: Entrant) -> Callable[..., Any]:
        def run(*arrays: Any) -> tuple[Any, ...]:
            inv = self.inv.with_arrays(dict(zip(self.inputs, arrays, strict=True)))
            return entrant.kernel.run_backend(inv, entrant.cfg)

        return run

    # -- checking ------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        for entrant in self.alive():
            if entrant.is_settled:
                continue
            found = self._attempt(entrant, "running", functools.partial(self._results, entrant))
            if found is None:
                continue
            for _ in range(1, self.num_warmup):
                self._attempt(entrant, "running", functools.partial(self._results, entrant))
            if self._wanted is None:
                self._settle_reference(entrant, found)
            judge = functools.partial(_wrong, found, self._wanted, self.inv.platform)
            verdict = self._attempt(entrant, "checking", lambda judge=judge: (judge(),))  # type: ignore[misc]
            if verdict is None:
                continue
            entrant.reason = verdict[0]
            if entrant.reason is None:
                self._measure(entrant, 1)
            self.report()
        self._measure_hopeless_again()
        self._drop_slower(HOPELESS)
        self.report()

    def _measure_hopeless_again(self) -> None:
        """After all others: what was left behind in a thread may have had the device, and is perhaps done by now."""
        best = min((entrant.milliseconds for entrant in self.alive()), default=math.inf)
        for entrant in self.alive():
            first, is_over = entrant.samples, time.monotonic() >= self.deadline
            if first and not (is_over or entrant.is_settled) and entrant.milliseconds > HOPELESS * best:
                entrant.samples = []  # as if for the first time: whoever is late is out, and the contest goes on
                self._measure(entrant, 1)
                entrant.samples = [min(first + entrant.samples)]

    def _settle_reference(self, first: Entrant, found: Any) -> None:
        """The reference's results; those of the first entrant where the reference cannot give any."""
        self._wanted, self.checked_against = found, first.kernel.name
        if self.reference is None or self.reference.backend == first.backend:
            return
        # It mostly takes part, and has been compiled then; or could not be.
        taking_part = [e for e in self.entrants if e.kernel is self.reference and not e.is_settled]
        ready = [e for e in taking_part if e.compiled is not None and e.reason is None]
        stand_in = (ready or taking_part or [Entrant(self.reference, None)])[0]
        wanted = None
        if stand_in.reason is None:
            wanted = self._attempt(stand_in, "running", lambda: self._reference_results(stand_in), 2 * SHARE)
        if wanted is not None:
            self._wanted, self.checked_against = wanted, self.reference.name
        else:
            self._is_unreferenced = True
            self.checked_against += f", because {self.reference.name}: {stand_in.reason}"

    def _reference_results(self, stand_in: Entrant) -> Any:
        if stand_in.compiled is not None:
            return self._results(stand_in)
        stand_in.cfg = stand_in.kernel.heuristic_cfg(self.inv)
        avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self.inputs.values()]
        stand_in.compiled = jax.jit(self._function(stand_in)).lower(*avals).compile()
        too_large = _too_large(stand_in.compiled, Settings.of(self.inv).device)
        if too_large:
            raise Unsupported(too_large)
        return self._results(stand_in)

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
            self.report()

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
            return in_thread(work, left * share, Settings.of(self.inv))
        except StillRunningError as fault:
            late = f"still {doing} after {left * share:.2g} s; left behind in a thread{self._behind(entrant, fault)}"
            if takes and left * share < PATIENCE * takes + (PROFILE_S if self.inv.platform == "gpu" else 0.0):
                self.deadline = time.monotonic()
                self.notes.append(f"ended early: {entrant.backend} {entrant.cfg} was {late}")
            else:
                entrant.reason = f"{OUT_OF_TIME}: {late}"
        except Exception as fault:  # as above
            entrant.reason = _told(doing, fault)
        return None

    def _behind(self, entrant: Entrant, fault: StillRunningError) -> str:
        """Who has kept the device, for all that is known: it does one thing at a time, and others wait."""
        if self._lost is None or not self._lost[1].is_alive():
            self._lost = entrant, fault.thread
            return ""
        first, _ = self._lost
        return f", behind {first.backend} {first.cfg}"


# -- threads ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class Settings:
    """JAX's settings that are a thread's own, and the device to run on."""

    x64: bool
    precision: Any
    promotion: Any
    device: Any

    @classmethod
    def of(cls, inv: Invocation) -> Settings:
        """As they are, on the device that the invocation is for."""
        return attrs.evolve(cls.here(), device=jax.local_devices(backend=inv.platform)[0])

    @classmethod
    def here(cls) -> Settings:
        """As they are, without a device of its own."""
        config: Any = jax.config
        precision, promotion = config.jax_default_matmul_precision, config.jax_numpy_dtype_promotion
        return cls(bool(config.jax_enable_x64), precision, promotion, config.jax_default_device)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.enable_x64(self.x64))
            stack.enter_context(jax.default_matmul_precision(self.precision))
            stack.enter_context(jax.numpy_dtype_promotion(getattr(self.promotion, "value", self.promotion)))
            stack.enter_context(jax.default_device(self.device))
            yield


def in_thread(work: Callable[[], Any], seconds: float | None, settings: Settings) -> Any:
    """What ``work`` returns, from a thread of its own, where no tracer is near; ``StillRunningError`` if it is late."""
    answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            with settings.entered():
                answers.put((True, work()))
        except BaseException as fault:  # handed over to who waits
            answers.put((False, fault))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        good, answer = answers.get(timeout=seconds)
    except queue.Empty:
        _left_behind.append(thread)
        raise StillRunningError(thread) from None
    if not good:
        raise answer
    return answer


#: Threads that were not waited for. A thread that comes back from XLA while Python ends takes the process down, so the
#: end waits for them: for a while, because what hangs for ever does not come back.
_left_behind: list[threading.Thread] = []
LAST_WAIT_S = 10.0


@atexit.register
def _wait_for_left_behind() -> None:
    until = time.monotonic() + LAST_WAIT_S
    for thread in _left_behind:
        thread.join(max(0.0, until - time.monotonic()))


# -- judging ---------------------------------------------------------------------------------------------------------


def _told(doing: str, fault: BaseException) -> str:
    first = (str(fault).strip().splitlines() or [""])[0]
    return f"{doing} raised {type(fault).__name__}: {first[:200]}"


def _too_large(compiled: Any, device: Any) -> str | None:
    """Whether it needs more memory than there is: on a CPU it would take the process with it."""
    analysis = compiled.memory_analysis()
    needed = getattr(analysis, "temp_size_in_bytes", 0) + getattr(analysis, "output_size_in_bytes", 0)
    stats = device.memory_stats() or {}
    room = stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else _available()
    if room is None or needed <= room:
        return None
    return f"needs {needed / 2**30:.3g} GiB of memory; there are {room / 2**30:.3g}"


def _available() -> int | None:
    """The bytes that the system can still give; None where it does not say."""
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return None


def _wrong(found: Sequence[Any], wanted: Sequence[Any], platform: str) -> str | None:
    """What is wrong with the results, or None."""
    if _types(found) != _types(wanted):
        return f"wrong: returned ({', '.join(_types(found))}), not ({', '.join(_types(wanted))})"
    for place, (mine, right) in enumerate(zip(found, wanted, strict=True)):
        name = f"result {place}" if len(wanted) > 1 else "the result"
        if not jnp.issubdtype(right.dtype, jnp.inexact):
            if not bool(jnp.array_equal(mine, right)):
                return f"wrong: {name} is another"
            continue
        error, misplaced = (np.asarray(value).item() for value in _distance(mine, right))
        if misplaced:
            return (
                f"wrong: {name} is NaN or infinite in {misplaced} places where the reference is not, or not where it is"
            )
        allowed = tolerance(right.dtype, platform)
        if not error <= allowed:
            return f"wrong: {name} is off by {error:.2g} of the largest value; {allowed:.2g} is allowed"
    return None


def tolerance(dtype: Any, platform: str) -> float:
    """The error that is allowed, over the largest value."""
    name = jnp.dtype(dtype).name
    return DEVICE_FLOAT32 if name == "float32" and platform != "cpu" else TOLERANCE.get(name, 1e-4)


def _types(results: Sequence[Any]) -> list[str]:
    return [f"{result.dtype}{list(result.shape)}" for result in results]


@jax.jit
def _distance(found: Any, wanted: Any) -> tuple[Any, Any]:
    """The largest difference over the largest value, and in how many places the one is finite and the other is not."""
    wide = jnp.promote_types(wanted.dtype, jnp.float32)
    found, wanted = found.astype(wide), wanted.astype(wide)
    both = jnp.isfinite(found) & jnp.isfinite(wanted)
    same = both | (found == wanted) | (jnp.isnan(found) & jnp.isnan(wanted))
    difference = jnp.max(jnp.where(both, jnp.abs(found - wanted), 0), initial=0)
    scale = jnp.max(jnp.where(both, jnp.abs(wanted), 0), initial=0)
    return difference / jnp.maximum(scale, np.finfo(wide).tiny), jnp.sum(~same)
