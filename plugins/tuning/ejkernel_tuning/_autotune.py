"""From a call to a contest, and from a contest to what is remembered."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Candidate
from ejkernel_core._devices import device_fingerprint
from ejkernel_core._discovery import Broken
from ejkernel_core._errors import Unsupported
from ejkernel_core._kernel import Invocation, LoadedKernel, version_changes
from ejkernel_core._measurement import Entry, Progress, Trial
from ejkernel_core._records import Provenance, Record, Shortfall

from ._contest import Contest, Entrant
from ._field import Field, Past
from ._result import Tuned, records_of
from ._threads import Settings, StillRunningError, in_thread

#: The key of the random numbers that inputs are made of.
SEED = 20
#: In these seconds inputs are there, or the device does not answer.
INPUTS_S = 120.0


def tune(
    inv: Invocation,
    candidates: Sequence[Candidate],
    judge: LoadedKernel | Broken | None,
    budget_s: float,
    inputs: dict[str, jax.Array] | None = None,
    configs: Iterable[Any] | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
    earlier: Sequence[Entry] = (),
    calls: tuple[int, int] = (1, 46),
    suspects: Sequence[Trial] = (),
    record: Record | None = None,
) -> Tuned:
    """Measure every configuration of the candidates on these inputs, or on some that the operation makes. Nobody wins
    whose results are not those of the ``judge``.

    ``calls`` is how many are made of each before it is measured, and how many are measured of those that come far. What
    is known of ``earlier`` ones is not measured again, ``suspects`` are tried last and alone, and where a ``record``
    comes of a budget that was too short, those that are missing race against its winner.

    >>> import ejkernel_core
    >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
    >>> plan = ejkernel_core.plan("flash_attention", query, query, query, backend="reference")
    >>> candidate = Candidate(plan.kernel, plan.cfg)
    >>> [entry.backend for entry in tune(plan.invocation, [candidate], plan.kernel, budget_s=30, calls=(1, 2)).entries]
    ['reference']
    """
    started = time.monotonic()
    placed = _placed(inv, inputs)
    past = Past(earlier, suspects, record if record and _is_of_here(record, candidates) else None)
    field = Field(inv, candidates, judge, None if configs is None else list(configs), past, started + budget_s)
    entrants = field.first()

    def progress(interrupted: bool = False) -> Progress:
        seconds = time.monotonic() - started
        entries = _entries(entrants, None)
        return Progress(inv, entries, seconds, budget_s, trials=contest.trials, interrupted=interrupted)

    contest = Contest(
        inv, placed, entrants, field.deadline, field.judge(entrants), lambda: report(progress()), *calls, field.others()
    )
    try:
        winner = contest.run()
    except BaseException:  # Ctrl-C, above all
        report(progress(interrupted=True))
        raise
    software = {name: version for candidate in candidates for name, version in candidate.kernel.software.items()}
    return _outcome(contest, winner, software, field.notes, budget_s, started)


def _placed(inv: Invocation, inputs: dict[str, jax.Array] | None) -> dict[str, jax.Array]:
    """The inputs on one device, wherever the caller has them."""
    settings = Settings.of(inv)

    def place() -> Any:
        return jax.device_put(made(inv) if inputs is None else inputs, settings.device)

    try:
        placed: dict[str, jax.Array] = in_thread(place, INPUTS_S, settings)  # because a trace may be going on here
    except StillRunningError:
        raise Unsupported(
            f"there were no inputs to measure with after {INPUTS_S:g} s: does the device answer?"
        ) from None
    return placed


def _outcome(
    contest: Contest,
    winner: Entrant | None,
    software: dict[str, str],
    faults: Sequence[str],
    budget_s: float,
    started: float,
) -> Tuned:
    inv, entries = contest.inv, _entries(contest.entrants, winner)
    shortfall = _shortfall(contest, entries, budget_s)
    checked = [f"checked against {contest.checked_against}"] if contest.checked_against else []
    notes = (*checked, *faults, *contest.notes, *([str(shortfall)] if shortfall else []))
    records = () if winner is None else records_of(entries, _provenance(inv, entries, software, shortfall))
    return Tuned(inv.tuning_keys, str(inv), entries, records, time.monotonic() - started, notes)


def _is_of_here(record: Record, candidates: Sequence[Candidate]) -> bool:
    """Whether its times say something about those that are measured now."""
    return record.provenance is not None and not any(version_changes(record, candidate) for candidate in candidates)


def _shortfall(contest: Contest, entries: Sequence[Entry], budget_s: float) -> Shortfall | None:
    unreached = sum(not entry.is_reached for entry in entries) or int(contest.has_uncounted)
    return Shortfall(unreached, float(budget_s)) if unreached else None


def made(inv: Invocation) -> dict[str, jax.Array]:
    """Inputs for an abstract invocation: the operation's own samples, else normal numbers, zeros and True."""
    key = jax.random.key(SEED)
    samples = inv.operation.samples if inv.operation else None
    full = samples(inv.arguments, key) if samples else _drawn(inv.arguments, key)
    return {name: full[name] for name, value in inv.arguments.items() if _is_array(value)}


def _drawn(arguments: Any, key: Any) -> dict[str, Any]:
    def draw(number: int, like: Any) -> Any:
        if jnp.issubdtype(like.dtype, jnp.floating):
            return jax.random.normal(jax.random.fold_in(key, number), like.shape, jnp.float32).astype(like.dtype)
        # Integers may be places or lengths: 0 is right more often than any other.
        return jnp.full(like.shape, like.dtype == jnp.bool_, like.dtype)

    return {name: draw(n, v) for n, (name, v) in enumerate(arguments.items()) if _is_array(v)}


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _entries(entrants: Sequence[Entrant], winner: Entrant | None) -> tuple[Entry, ...]:
    ordered = sorted(entrants, key=lambda e: (e is not winner, e.reason is not None, e.milliseconds))
    return tuple(entrant.entry for entrant in ordered)


def _provenance(
    inv: Invocation, entries: Sequence[Entry], software: dict[str, str], shortfall: Shortfall | None
) -> Callable[[Entry], Provenance]:
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    device = device_fingerprint(jax.local_devices(backend=inv.platform)[0])
    tried = tuple((f"{e.backend} {e.cfg}", e.reason if e.milliseconds is None else e.milliseconds) for e in entries)

    def provenance(entry: Entry) -> Provenance:
        assert entry.milliseconds is not None
        return Provenance(
            when=when,
            device=device,
            milliseconds=entry.milliseconds,
            backends=tuple(dict.fromkeys(entry.backend for entry in entries)),
            software=software,
            tried=tried,
            shortfall=shortfall,
        )

    return provenance
