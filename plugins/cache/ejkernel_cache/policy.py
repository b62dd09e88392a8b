"""The policy ``cache``: it stores measured configurations on disk, where later processes find them."""

from __future__ import annotations

from collections.abc import Sequence

from ejkernel_core import (
    Candidate,
    Choice,
    Invocation,
    Key,
    Record,
    RecordError,
    Scope,
    Unsupported,
    hookimpl,
    recall,
    successor,
)
from ejkernel_core.extend import Earlier, Progress

from ._store import PersistentCache, default_cache

#: Above packaged records and tuners.
RANK = 70
#: How much longer than its own budget a process waits for another process.
GRACE_S = 30.0


@hookimpl
def select_config(inv: Invocation, candidates: Sequence[Candidate], scope: Scope) -> Choice | None:
    """The fastest record on disk for this call, for its bucket, or for the nearest call."""
    cache, other_versions = default_cache(), scope.policy.other_versions
    choice = recall(inv, candidates, f"disk ({cache.path})", cache.find, near=cache.near, other_versions=other_versions)
    if choice is None and (crashes := cache.crashes(inv.tuning_keys[-1])):
        raise Unsupported(f"there is no record; {crashes}")
    return choice


@hookimpl
def config_selected(inv: Invocation, choice: Choice) -> None:
    """Store the record for this call; and for its bucket, unless that has a faster one. ``OSError`` if one of them
    cannot be stored, for explanations.
    """
    cache, record = default_cache(), choice.record
    assert record is not None  # the core calls this for measured choices only
    exact, *bucket_keys = inv.tuning_keys
    faults = [cache.put(exact, successor(_stored_record(cache, exact, record), record))]
    faults += [cache.put(key, record) for key in bucket_keys if _is_as_fast(record, _stored_record(cache, key, record))]
    fault = next(filter(None, faults), None)
    if fault is not None:
        raise fault


@hookimpl
def tuning_started(inv: Invocation, scope: Scope) -> Earlier:
    """Wait while another process measures this call or one of its bucket. Return what is left of an unfinished
    measurement.
    """
    unfinished, key = default_cache().unfinished, inv.tuning_keys[-1]
    # The other process may have just begun with the same budget. It stores its records before it releases the lock.
    if not unfinished.take(key, scope.policy.budget_s + GRACE_S if scope.policy.wait else 0.0):
        raise Unsupported("another process is measuring this; the heuristic is taken meanwhile")
    return Earlier(unfinished.entries(key), unfinished.crashed(key))


@hookimpl
def tuning_progress(inv: Invocation, progress: Progress) -> None:
    """Store what is about to be tried and the results so far. At the end, release the lock."""
    unfinished, key = default_cache().unfinished, inv.tuning_keys[-1]
    if progress.finished:
        unfinished.end(key, progress.entries, progress.interrupted)
    else:
        unfinished.note(key, progress.trials)
        unfinished.keep(key, progress.entries)


def _stored_record(cache: PersistentCache, key: Key, record: Record) -> Record | None:
    try:
        return cache.predecessor(key, record)
    except RecordError:  # a file that cannot be read may be replaced
        return None


def _is_as_fast(new: Record, old: Record | None) -> bool:
    """Whether the new record replaces the old one. A record put there by hand is never replaced. One of a measurement
    that ran out of time is replaced by one of a larger budget.
    """
    if old is None:
        return True
    if old.provenance is None or new.provenance is None:
        return False
    old_shortfall, new_shortfall = old.provenance.shortfall, new.provenance.shortfall
    if old_shortfall is not None and (new_shortfall is None or new_shortfall.budget_s > old_shortfall.budget_s):
        return True
    return new.provenance.milliseconds <= old.provenance.milliseconds
