"""Measurements under way: one process at a time measures a key, and what it found out outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from ejkernel_core import Key, RecordError, from_json, imported_type, to_json
from ejkernel_core.tuning import Entry

from . import _temporary
from ._directory import Directory
from ._documents import LIMIT

try:
    import fcntl
except ImportError:  # Windows: two processes may measure the same thing; both store it whole
    fcntl = None  # type: ignore[assignment]

FOLDER = ".tuning"
#: How often a process looks whether the other one is done.
POLL_S = 0.1
#: Who has not said for so long that it is alive is waited for no longer.
EXPIRES_S = 300.0
#: How often what was found out is written down.
WRITE_S = 0.5


@attrs.define(eq=False)
class Unfinished:
    """What this process measures, of the keys of one cache."""

    files: Directory
    _held: dict[str, int] = attrs.field(factory=dict)
    _written: dict[str, float] = attrs.field(factory=dict)

    def take(self, key: Key, seconds: float = EXPIRES_S) -> bool:
        """Wait until no other process measures this key, and have others wait for this one; False if it takes longer.

        Where locks cannot be had, or the other does not say for long that it is alive, it goes on without.
        """
        if fcntl is None or key.digest in self._held:
            return True
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            path = self.files.made(FOLDER) / f"{key.digest}.lock"
            while (descriptor := _locked(path)) is None:
                if time.time() - os.stat(path).st_mtime > EXPIRES_S:
                    return True
                if time.monotonic() > until:
                    return False
                time.sleep(POLL_S)
            os.write(descriptor, _temporary.new_name().encode())  # for who looks into the file: the owner
            self._held[key.digest] = descriptor
        return True

    def release(self, key: Key) -> None:
        """Let the others go on."""
        descriptor = self._held.pop(key.digest, None)
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path(key, "lock"))
            os.close(descriptor)

    def keep(self, key: Key, entries: Sequence[Entry]) -> None:
        """Write down what was found out, not too often, and say that this process is alive."""
        now = time.monotonic()
        if now - self._written.get(key.digest, -WRITE_S) < WRITE_S:
            return
        self._written[key.digest] = now
        with contextlib.suppress(OSError):
            self.files.write_at((FOLDER,), f"{key.digest}.json", json.dumps(list(_documents(entries))).encode())
            if key.digest in self._held:
                os.utime(self._path(key, "lock"))

    def forget(self, key: Key) -> None:
        """What was found out is in a record now."""
        self._written.pop(key.digest, None)
        with contextlib.suppress(OSError):
            os.unlink(self._path(key, "json"))

    def entries(self, key: Key) -> tuple[Entry, ...]:
        """What was found out by somebody who did not come to an end."""
        try:
            with open(self._path(key, "json"), "rb") as file:
                documents = json.loads(file.read(LIMIT))
            return tuple(entry for document in documents if (entry := _entry(document)))
        except (OSError, ValueError, TypeError, LookupError, RecursionError, RecordError):
            return ()  # nothing is lost but time

    def _path(self, key: Key, suffix: str) -> Path:
        return self.files.root / FOLDER / f"{key.digest}.{suffix}"


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
    os.close(descriptor)
    return None


def _documents(entries: Sequence[Entry]) -> Iterator[dict[str, Any]]:
    for entry in entries:
        if entry.reason or entry.milliseconds is not None:
            with contextlib.suppress(RecordError):  # this one has to be measured again
                yield {
                    "backend": entry.backend,
                    "config": to_json(entry.cfg),
                    "milliseconds": entry.milliseconds,
                    "reason": entry.reason,
                }


def _entry(document: Any) -> Entry | None:
    name = json.loads(document["config"])["type"]
    kind = None if name is None else imported_type(name)
    if name is not None and kind is None:
        return None
    cfg = from_json(document["config"], kind)  # type: ignore[arg-type]
    return Entry(document["backend"], cfg, document["milliseconds"], reason=document["reason"])
