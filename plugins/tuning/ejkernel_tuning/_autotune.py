"""``tune``: measure one invocation, and make the records."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from ejkernel_core import Candidate, Invocation, Provenance, Record, Unsupported
from ejkernel_core.extend import Broken, Entry, LoadedKernel, Progress, Shortfall, Trial, device_fingerprint, text_of

from ._measurement import Measurement, Variant
from ._result import Tuned, records_of
from ._samples import sample_inputs
from ._threads import Settings, StillRunningError, run_in_thread
from ._variants import KnownResults, VariantSource

#: If making the inputs takes longer, the device does not answer.
INPUTS_S = 120.0


def tune(
    inv: Invocation,
    candidates: Sequence[Candidate],
    reference: LoadedKernel | Broken | None,
    budget_s: float,
    inputs: dict[str, jax.Array] | None = None,
    configs: Iterable[Any] | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
    earlier: Sequence[Entry] = (),
    calls: tuple[int, int] = (1, 46),
    crashed: Sequence[Trial] = (),
    record: Record | None = None,
    has_burst_ranking: bool = False,
) -> Tuned:
    """Measure every configuration of the candidates, on these inputs, and on samples in the place of others. A
    configuration with wrong results, compared with those of the ``reference``, is never selected.

    ``calls`` is the number of warm-up calls, and that of measured calls for configurations that stay to the end.
    ``earlier`` results are not measured again, and ``crashed`` are tried last, one at a time. With the ``record`` of a
    measurement that ran out of time, its configuration is compared with those that were not reached. With
    ``has_burst_ranking``, what is measured under load is ranked by bursts first, which the result has for a comparison.

    >>> import ejkernel_core
    >>> query = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")
    >>> plan = ejkernel_core.plan("flash_attention", query, query, query, backend="reference")
    >>> candidate = Candidate(plan.kernel, plan.cfg)
    >>> [entry.backend for entry in tune(plan.invocation, [candidate], plan.kernel, budget_s=30, calls=(1, 2)).entries]
    ['reference']
    """
    start = time.monotonic()
    inputs_on_device = _place_inputs(inv, inputs)
    known = KnownResults(earlier, crashed, record if record and _has_same_versions(record, candidates) else None)
    source = VariantSource(
        inv, candidates, reference, None if configs is None else list(configs), known, start + budget_s
    )
    variants = source.first_variants()

    def progress(interrupted: bool = False) -> Progress:
        seconds = time.monotonic() - start
        entries = _entries(variants, None)
        return Progress(inv, entries, seconds, budget_s, trials=measurement.trials, interrupted=interrupted)

    measurement = Measurement(
        inv,
        inputs_on_device,
        variants,
        source.deadline,
        source.reference_variant(variants),
        lambda: report(progress()),
        *calls,
        source.others(),
        has_burst_ranking=has_burst_ranking,
    )
    try:
        winner = measurement.run()
    except BaseException:  # mostly Ctrl-C
        report(progress(interrupted=True))
        raise
    software = {name: version for candidate in candidates for name, version in candidate.kernel.software.items()}
    return _make_result(measurement, winner, software, source.notes, budget_s, start)


def _place_inputs(inv: Invocation, inputs: dict[str, jax.Array] | None) -> dict[str, jax.Array]:
    """The inputs on the one device that measures, with samples for those that are missing."""
    settings = Settings.of(inv)

    def place() -> Any:
        return sample_inputs(inv, jax.device_put(inputs or {}, settings.device))

    try:
        # In a thread, because this one may be tracing.
        inputs_on_device: dict[str, jax.Array] = run_in_thread(place, INPUTS_S, settings)
    except StillRunningError:
        raise Unsupported(
            f"there were no inputs to measure with after {INPUTS_S:g} s: does the device answer?"
        ) from None
    return inputs_on_device


def _make_result(
    measurement: Measurement,
    winner: Variant | None,
    software: dict[str, str],
    faults: Sequence[str],
    budget_s: float,
    start: float,
) -> Tuned:
    inv, entries = measurement.inv, _entries(measurement.variants, winner)
    shortfall = _shortfall(measurement, entries, budget_s)
    check_notes = [f"checked against {measurement.expected_source}"] if measurement.expected_source else []
    notes = (*check_notes, *faults, *measurement.notes, *([str(shortfall)] if shortfall else []))
    records = () if winner is None else records_of(entries, _provenance(inv, entries, software, shortfall))
    seconds = time.monotonic() - start
    return Tuned(inv.tuning_keys, str(inv), entries, records, seconds, notes, measurement.burst_ranking)


def _has_same_versions(record: Record, candidates: Sequence[Candidate]) -> bool:
    """Whether the record's times can be compared with those that are measured now."""
    provenance = record.provenance
    return provenance is not None and not any(provenance.changes(candidate.software) for candidate in candidates)


def _shortfall(measurement: Measurement, entries: Sequence[Entry], budget_s: float) -> Shortfall | None:
    unreached = sum(not entry.is_reached for entry in entries) or int(measurement.has_uncounted)
    return Shortfall(unreached, float(budget_s)) if unreached else None


def _entries(variants: Sequence[Variant], winner: Variant | None) -> tuple[Entry, ...]:
    ordered = sorted(variants, key=lambda e: (e is not winner, e.reason is not None, e.milliseconds))
    return tuple(variant.entry for variant in ordered)


def _provenance(
    inv: Invocation, entries: Sequence[Entry], software: dict[str, str], shortfall: Shortfall | None
) -> Callable[[Entry], Provenance]:
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    device = device_fingerprint(jax.local_devices(backend=inv.platform)[0])
    tried = tuple((f"{e.backend} {text_of(e.cfg)}", e.outcome) for e in entries)

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
