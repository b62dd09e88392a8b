"""The policy ``cache``: what was measured is on disk afterwards, and found there by every later process."""

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
from ejkernel_core._measurement import Earlier, Progress

from ._store import PersistentCache, default_cache

#: Before what comes with packages, and before what measures.
RANK = 70
#: How much longer than its own budget a process waits for another.
GRACE_S = 30.0


@hookimpl
def select_config(inv: Invocation, candidates: Sequence[Candidate], scope: Scope) -> Choice | None:
    """The fastest record on disk for this call, or for those like it."""
    cache, others = default_cache(), scope.policy.other_versions
    choice = recall(inv, candidates, f"disk ({cache.path})", cache.find, near=cache.near, other_versions=others)
    if choice is None and (dangers := cache.dangers(inv.tuning_keys[-1])):
        raise Unsupported(f"there is no record; {dangers}")
    return choice


@hookimpl
def config_selected(inv: Invocation, choice: Choice) -> None:
    """Write it down for this call, and for those like it unless they have a faster one."""
    cache, record = default_cache(), choice.record
    assert record is not None  # the core tells of no choice without one
    exact, *alike = inv.tuning_keys
    cache.put(exact, successor(_known(cache, exact, record), record))
    for key in alike:
        if _is_as_fast(record, _known(cache, key, record)):
            cache.put(key, record)


@hookimpl
def tuning_started(inv: Invocation, scope: Scope) -> Earlier:
    """Wait while another process measures this, or calls like it; then what somebody found out who was interrupted."""
    unfinished, key = default_cache().unfinished, inv.tuning_keys[-1]
    # The other may have begun with as much time, and stores before it lets go.
    if not unfinished.take(key, scope.policy.budget_s + GRACE_S if scope.policy.wait else 0.0):
        raise Unsupported("another process is measuring this; the heuristic is taken meanwhile")
    return Earlier(unfinished.entries(key), unfinished.suspects(key))


@hookimpl
def tuning_progress(inv: Invocation, progress: Progress) -> None:
    """Note what is tried before it is, and keep what was found out so far; at the end, let the others go on."""
    unfinished, key = default_cache().unfinished, inv.tuning_keys[-1]
    if progress.finished:
        unfinished.end(key, progress.entries, progress.interrupted)
    else:
        unfinished.note(key, progress.trials)
        unfinished.keep(key, progress.entries)


def _known(cache: PersistentCache, key: Key, record: Record) -> Record | None:
    try:
        return cache.predecessor(key, record)
    except RecordError:  # what cannot be read may be replaced
        return None


def _is_as_fast(new: Record, old: Record | None) -> bool:
    """What was put there by hand is never replaced; what comes of too short a budget, by what comes of a larger one."""
    if old is None:
        return True
    if old.provenance is None or new.provenance is None:
        return False
    short, still_short = old.provenance.shortfall, new.provenance.shortfall
    if short is not None and (still_short is None or still_short.budget_s > short.budget_s):
        return True
    return new.provenance.milliseconds <= old.provenance.milliseconds
