"""The policy ``cache``: what was measured is on disk afterwards, and found there by every later process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ejkernel_core import Candidate, Choice, Invocation, Key, Record, RecordError, Scope, hookimpl, recall, successor

from ._store import PersistentCache, default_cache

if TYPE_CHECKING:
    from ejkernel_core.tuning import Earlier, Progress

#: Before what comes with packages, and before what measures.
RANK = 70
#: How much longer than its own budget a process waits for another.
GRACE_S = 30.0


@hookimpl
def select_config(inv: Invocation, candidates: Sequence[Candidate]) -> Choice | None:
    """The fastest record on disk for this call, or for those like it."""
    cache = default_cache()
    return recall(inv, candidates, f"disk ({cache.path})", cache.find)


@hookimpl
def config_selected(inv: Invocation, choice: Choice) -> None:
    """Write it down for this call, and for those like it unless they have a faster one."""
    cache, record = default_cache(), choice.record
    assert record is not None  # the core tells of no choice without one
    exact, *alike = inv.tuning_keys
    try:
        cache.put(exact, successor(_known(cache, exact, record), record))
        for key in alike:
            if _is_as_fast(record, _known(cache, key, record)):
                cache.put(key, record)
    finally:
        _end(inv)


@hookimpl
def tuning_started(inv: Invocation, scope: Scope) -> Earlier:
    """Wait while another process measures this, or calls like it; then what somebody found out who was interrupted."""
    from ejkernel_core.tuning import Earlier

    unfinished, key = default_cache().unfinished, inv.tuning_keys[-1]
    # The other may have begun with as much time, and stores before it lets go.
    if not unfinished.take(key, scope.policy.budget_s + GRACE_S if scope.policy.wait else 0.0):
        return Earlier(is_busy=True)
    return Earlier(unfinished.entries(key))


@hookimpl
def tuning_progress(inv: Invocation, progress: Progress) -> None:
    """Keep what was found out so far. Where nothing was, there will be no record, and this is the end."""
    unfinished, key = default_cache().unfinished, inv.tuning_keys[-1]
    if not progress.finished:
        unfinished.keep(key, progress.entries)
    elif not any(entry.milliseconds is not None and not entry.reason for entry in progress.entries):
        _end(inv)


def _end(inv: Invocation) -> None:
    unfinished, key = default_cache().unfinished, inv.tuning_keys[-1]
    unfinished.forget(key)
    unfinished.release(key)


def _known(cache: PersistentCache, key: Key, record: Record) -> Record | None:
    try:
        return cache.read(key, record.backend, type(record.cfg))
    except RecordError:  # what cannot be read may be replaced
        return None


def _is_as_fast(new: Record, old: Record | None) -> bool:
    """What was put there by hand is never replaced."""
    if old is None:
        return True
    return bool(old.provenance and new.provenance and new.provenance.milliseconds <= old.provenance.milliseconds)
