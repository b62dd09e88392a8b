"""Measurements under way: one process at a time measures a key, and what it found out outlives it.

Three files beside the lock, all named by the key: ``.json`` has what was measured so far, ``.trying`` what is being
compiled or run at this moment, and ``.died`` what was so when a process died.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

import ejkernel_core
from ejkernel_core import Key, RecordError, from_json, to_json
from ejkernel_core._measurement import Entry, Trial
from ejkernel_core._records import DIED

from . import _temporary
from ._directory import UNFINISHED, Directory
from ._documents import LIMIT

try:
    import fcntl
except ImportError:  # Windows: two processes may measure the same thing; both store it whole
    fcntl = None  # type: ignore[assignment]

#: How often a process looks whether the other one is done.
POLL_S = 0.1
#: How often what was found out is written down.
WRITE_S = 0.5
#: A configuration at which processes have died that often, the last time alone, is out.
DEATHS = 2
STEPS = {"compiling": "compiled", "running": "run"}


@attrs.define(eq=False)
class Unfinished:
    """What this process measures, of the keys of one cache. Only who has a key's lock writes anything for it."""

    files: Directory
    _held: dict[str, int] = attrs.field(factory=dict)
    _written: dict[str, float] = attrs.field(factory=dict)
    _noted: dict[str, tuple[Trial, ...]] = attrs.field(factory=dict)

    def take(self, key: Key, seconds: float = 0.0) -> bool:
        """Wait until no other process measures this key, and have others wait for this one; False if it takes longer.

        The system releases a lock with its process, so who has one is alive. Where there are no locks, it goes on
        without, and writes nothing.
        """
        if fcntl is None or key.digest in self._held:
            return True
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            path = self.files.made(UNFINISHED) / f"{key.digest}.lock"
            while (descriptor := _locked(path)) is None:
                if time.monotonic() > until:
                    return False
                time.sleep(POLL_S)
            self._held[key.digest] = descriptor
            os.ftruncate(descriptor, 0)
            os.write(descriptor, _temporary.new_name().encode())  # for who asks without a lock: the owner
            self._inherit(key)
        return True

    def release(self, key: Key) -> None:
        """Let the others go on."""
        descriptor = self._held.pop(key.digest, None)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path(key, "lock"))
            os.close(descriptor)

    # -- what was measured -------------------------------------------------------------------------------------------

    def keep(self, key: Key, entries: Sequence[Entry], at_once: bool = False) -> None:
        """Write down what was found out, not too often."""
        now = time.monotonic()
        if key.digest not in self._held or (not at_once and now - self._written.get(key.digest, -WRITE_S) < WRITE_S):
            return
        self._written[key.digest] = now
        # Who is out for a death is in a file of its own, which may be removed.
        self._write(key, "json", list(_documents(e for e in entries if not e.reason.startswith(DIED))))

    def entries(self, key: Key) -> tuple[Entry, ...]:
        """What was found out by somebody who did not come to an end, and what took too many processes with it."""
        found = (*self._read(key, "json"), *(d for d in self._read(key, "died") if d.get("is_out")))
        # Nothing is lost but time where one cannot be read.
        return tuple(entry for document in found if (entry := _understood(_entry, key, document)))

    def end(self, key: Key, entries: Sequence[Entry], is_interrupted: bool) -> None:
        """Nothing of this key is tried by this process any more."""
        if key.digest in self._held:
            self._acquit(key, entries)
            self.note(key, ())
            if is_interrupted:
                self.keep(key, entries, at_once=True)
            else:  # what was found out is in a record now, or is nothing to go on from
                self._remove(key, "json")
        self._written.pop(key.digest, None)
        self.release(key)

    # -- what is dangerous -------------------------------------------------------------------------------------------

    def note(self, key: Key, trials: tuple[Trial, ...]) -> None:
        """Write down what is about to be tried: it may take the process with it."""
        before = self._noted.get(key.digest, ())
        if key.digest not in self._held or list(map(id, trials)) == list(map(id, before)):
            return
        if trials:
            self._noted[key.digest] = trials
            # For a process that dies, what the system has is enough; for a machine, it would not be.
            self._write(key, "trying", list(_noted(trials)), durably=False)
        else:
            self._noted.pop(key.digest, None)
            self._remove(key, "trying")

    def suspects(self, key: Key) -> tuple[Trial, ...]:
        """What was being tried when a process died, and may be tried again."""
        found = (document for document in self._read(key, "died") if not document.get("is_out"))
        return tuple(trial for document in found if (trial := _understood(_trial, key, document)))

    def told(self, key: Key) -> str:
        """What is dangerous about measuring this, in words; "" for nothing."""
        documents = self._read(key, "died")
        if _temporary.is_gone(self._owner(key)):  # and nobody has measured this since
            for note in self._read(key, "trying"):
                step = note.get("step", "tried")
                reason = f"{DIED} while it was {STEPS.get(step, step)}; it will be tried last, and alone"
                documents.append({**note, "reason": reason})
        return "; ".join(
            f"{d['backend']} {_understood(_config, key, d) or d['config']}: {d.get('reason', DIED)}" for d in documents
        )

    def _owner(self, key: Key) -> str:
        """Who had the lock last."""
        try:
            return self._path(key, "lock").read_text(errors="replace")
        except OSError:
            return ""

    def _inherit(self, key: Key) -> None:
        """Take over what a process that had the lock was trying when it died."""
        note = self._read(key, "trying")
        if note:
            known = {_identity(document): document for document in self._read(key, "died")}
            for document in note:
                step = document.get("step", "tried")
                before = known.get(_identity(document), {})
                deaths = before.get("deaths", 0) + 1
                # Of several that were compiled at once, one is to blame, and nobody knows which.
                is_out = before.get("is_out", False) or (deaths >= DEATHS and len(note) == 1)
                reason = self._reason(key, step, deaths, is_out)
                known[_identity(document)] = {**document, "deaths": deaths, "is_out": is_out, "reason": reason}
            self._write(key, "died", list(known.values()))
        self._remove(key, "trying")

    def _reason(self, key: Key, step: str, deaths: int, is_out: bool) -> str:
        times = {1: "once", 2: "twice"}.get(deaths, f"{deaths} times")
        outlook = "is out" if is_out else "is tried last, and alone"
        way_back = f"ejkernel_cache.default_cache().forgive(), or remove {self._path(key, 'died')}"
        return f"{DIED} while it was {STEPS.get(step, step)}, {times}, so it {outlook}; to change that: {way_back}"

    def _acquit(self, key: Key, entries: Sequence[Entry]) -> None:
        """Who was suspected, and has come through it, is no longer."""
        known = self._read(key, "died")
        through = {_identity(document) for document in _documents(e for e in entries if e.is_reached)} if known else ()
        left = [document for document in known if document.get("is_out") or _identity(document) not in through]
        if not left:
            self._remove(key, "died")
        elif left != known:
            self._write(key, "died", left)

    # -- files -------------------------------------------------------------------------------------------------------

    def _read(self, key: Key, suffix: str) -> list[dict[str, Any]]:
        try:
            with open(self._path(key, suffix), "rb") as file:
                documents = json.loads(file.read(LIMIT))
        except (OSError, ValueError, RecursionError):
            return []
        return [d for d in documents if _is_sound(d)] if isinstance(documents, list) else []

    def _write(self, key: Key, suffix: str, documents: list[dict[str, Any]], durably: bool = True) -> None:
        with contextlib.suppress(OSError):
            self.files.write_at((UNFINISHED,), f"{key.digest}.{suffix}", json.dumps(documents).encode(), durably)

    def _remove(self, key: Key, suffix: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path(key, suffix))

    def _path(self, key: Key, suffix: str) -> Path:
        return self.files.root / UNFINISHED / f"{key.digest}.{suffix}"


def _locked(path: Path) -> int | None:
    """The file, open and locked by this process; None while another has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Who had it before has removed the file: this one has no name any more, and locks nobody out.
        if os.fstat(descriptor).st_ino == os.stat(path).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


# -- documents -------------------------------------------------------------------------------------------------------


def _documents(entries: Iterable[Entry]) -> Iterator[dict[str, Any]]:
    for entry in entries:
        if entry.reason or entry.milliseconds is not None:
            with contextlib.suppress(RecordError):  # this one has to be measured again
                yield {
                    "backend": entry.backend,
                    "config": to_json(entry.cfg),
                    "milliseconds": entry.milliseconds,
                    "reason": entry.reason,
                    "is_checked": entry.is_checked,
                }


def _noted(trials: Sequence[Trial]) -> Iterator[dict[str, Any]]:
    for trial in trials:
        with contextlib.suppress(RecordError):  # what cannot be written down has nobody warned of it
            yield {"backend": trial.backend, "config": to_json(trial.cfg), "step": trial.step}


def _is_sound(document: Any) -> bool:
    return isinstance(document, dict) and all(isinstance(document.get(name), str) for name in ("backend", "config"))


def _identity(document: dict[str, Any]) -> tuple[str, str]:
    return document["backend"], document["config"]


def _understood(read: Any, key: Key, document: dict[str, Any]) -> Any:
    try:
        return read(key, document)
    except (ValueError, TypeError, LookupError, RecursionError, RecordError):
        return None


def _entry(key: Key, document: dict[str, Any]) -> Entry:
    cfg, milliseconds = _config(key, document), document.get("milliseconds")
    is_checked = document.get("is_checked", False)
    return Entry(document["backend"], cfg, milliseconds, reason=document["reason"], is_checked=is_checked)


def _trial(key: Key, document: dict[str, Any]) -> Trial:
    return Trial(document["backend"], _config(key, document), document["step"])


def _config(key: Key, document: dict[str, Any]) -> Any:
    kind = ejkernel_core.config_type(f"{key.op}.{document['backend']}")
    return from_json(document["config"], kind or type(None))
