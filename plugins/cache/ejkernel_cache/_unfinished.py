"""Unfinished measurements: one process at a time measures a key, and its results are kept if it is interrupted.

There are three files beside the lock, with the key in their names. ``.json`` has the results so far, ``.trying`` what
is being compiled or run now, and ``.crashed`` what was being compiled or run when a process crashed.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from ejkernel_core import Key, RecordError, from_json, to_json
from ejkernel_core.extend import Entry, Reason, Trial

from . import _temporary
from ._directory import UNFINISHED, Directory, open_lock
from ._documents import kernel_config_type

try:
    import fcntl
except ImportError:  # Windows: two processes may measure the same call, and both store their results
    fcntl = None  # type: ignore[assignment]

#: How often a waiting process tries to get the lock.
POLL_S = 0.1
#: The shortest time between two writes of results.
WRITE_S = 0.5
#: A configuration is excluded after so many processes have crashed while trying it, if it was alone the last time.
MAX_CRASHES = 2
PARTICIPLES = {"compiling": "compiled", "running": "run"}
#: The longest time of one call that is read. No budget is as long.
MAX_MILLISECONDS = 1e9


@attrs.define(eq=False)
class Unfinished:
    """The measurements of this process, by the keys of one cache. Only the process with the lock of a key writes."""

    files: Directory
    _locks: dict[str, int] = attrs.field(factory=dict)
    _write_times: dict[str, float] = attrs.field(factory=dict)
    _trials: dict[str, tuple[Trial, ...]] = attrs.field(factory=dict)

    def take(self, key: Key, seconds: float = 0.0) -> bool:
        """Lock a key for this process, after waiting for another process that measures it; False if that takes longer.

        The system releases a lock with its process, so only a living process has one. Where there are no locks, this
        returns True, and nothing is written.
        """
        if fcntl is None or key.digest in self._locks:
            return True
        until = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            path = self.files.make_folder(UNFINISHED) / f"{key.digest}.lock"
            while (descriptor := _try_lock(path)) is None:
                if time.monotonic() > until:
                    return False
                time.sleep(POLL_S)
            self._locks[key.digest] = descriptor
            os.ftruncate(descriptor, 0)
            os.write(descriptor, _temporary.new_name().encode())  # the owner, for readers without the lock
            self._inherit(key)
        return True

    def release(self, key: Key) -> None:
        """Release the lock of a key."""
        descriptor = self._locks.pop(key.digest, None)
        if descriptor is not None:
            self._remove(key, "lock")
            os.close(descriptor)

    # -- results -----------------------------------------------------------------------------------------------------

    def keep(self, key: Key, entries: Sequence[Entry], at_once: bool = False) -> None:
        """Write the results, not too often."""
        now = time.monotonic()
        is_too_soon = now - self._write_times.get(key.digest, -WRITE_S) < WRITE_S
        if key.digest not in self._locks or (is_too_soon and not at_once):
            return
        self._write_times[key.digest] = now
        # Those that ended processes are in a file of their own, which users may remove.
        self._write(key, "json", list(_documents(e for e in entries if not e.reason.startswith(Reason.CRASHED))))

    def entries(self, key: Key) -> tuple[Entry, ...]:
        """The results of an unfinished measurement, and the configurations that ended too many processes."""
        crashed = ({**d, "reason": self._reason_of(key, d)} for d in self._read(key, "crashed") if d["is_out"])
        documents = (*self._read(key, "json"), *crashed)
        # One that cannot be read is measured again.
        return tuple(entry for document in documents if (entry := _parse(_parse_entry, key, document)))

    def end(self, key: Key, entries: Sequence[Entry], is_interrupted: bool) -> None:
        """The measurement of a key has ended. Results are kept if it was interrupted."""
        if key.digest in self._locks:
            self._clear_crashed(key, entries)
            self.note(key, ())
            if is_interrupted:
                self.keep(key, entries, at_once=True)
            else:  # the results are in a record now, or are of no use
                self._remove(key, "json")
        self._write_times.pop(key.digest, None)
        self.release(key)

    # -- configurations that end processes ---------------------------------------------------------------------------

    def note(self, key: Key, trials: tuple[Trial, ...]) -> None:
        """Write what is about to be tried, because it may end the process."""
        earlier_trials = self._trials.get(key.digest, ())
        if key.digest not in self._locks or list(map(id, trials)) == list(map(id, earlier_trials)):
            return
        if trials:
            self._trials[key.digest] = trials
            # Not durable: the file has to survive the process, not the machine.
            self._write(key, "trying", list(_trial_documents(trials)), durably=False)
        else:
            self._trials.pop(key.digest, None)
            self._remove(key, "trying")

    def crashed(self, key: Key) -> tuple[Trial, ...]:
        """What was being tried when a process crashed, and may still be tried again."""
        documents = (document for document in self._read(key, "crashed") if not document["is_out"])
        return tuple(trial for document in documents if (trial := _parse(_parse_trial, key, document)))

    def describe_crashes(self, key: Key) -> str:
        """The configurations that ended processes, each with its reason, in words; "" for none."""
        crashes = [(document, self._reason_of(key, document)) for document in self._read(key, "crashed")]
        if _temporary.is_process_gone(self._owner(key)):  # and the key has not been measured since
            for note in self._read(key, "trying"):
                reason = f"{Reason.CRASHED} while it was {PARTICIPLES[note['step']]}; it will be tried last, and alone"
                crashes.append((note, reason))
        trials = ((_parse(_parse_trial, key, document), reason) for document, reason in crashes)
        return "; ".join(f"{trial.backend} {trial.cfg}: {reason}" for trial, reason in trials if trial)

    def _owner(self, key: Key) -> str:
        """The name of the process that had the lock last."""
        data = self._data(key, "lock")
        return "" if data is None else data.decode(errors="replace")

    def _inherit(self, key: Key) -> None:
        """Move what the last process was trying when it crashed from ``.trying`` to ``.crashed``."""
        trial_notes = self._read(key, "trying")
        if trial_notes:
            documents = {_identity(document): document for document in self._read(key, "crashed")}
            for document in trial_notes:
                earlier = documents.get(_identity(document), {})
                crashes = earlier.get("crashes", 0) + 1
                # Of several that were compiled at once, it is unknown which one ended the process.
                is_out = earlier.get("is_out", False) or (crashes >= MAX_CRASHES and len(trial_notes) == 1)
                crashed = {**document, "crashes": crashes, "is_out": is_out}
                documents[_identity(document)] = {**crashed, "reason": self._reason_of(key, crashed)}
            self._write(key, "crashed", list(documents.values()))
        self._remove(key, "trying")

    def _reason_of(self, key: Key, crashed: dict[str, Any]) -> str:
        """Why a configuration that ended processes is tried last, or is out. The file has it too, for people."""
        times = {1: "once", 2: "twice"}.get(crashed["crashes"], f"{crashed['crashes']} times")
        consequence = "is out" if crashed["is_out"] else "is tried last, and alone"
        remedy = f"ejkernel_cache.default_cache().forget_crashes(), or remove {self._path(key, 'crashed')}"
        participle = PARTICIPLES[crashed["step"]]
        return f"{Reason.CRASHED} while it was {participle}, {times}, so it {consequence}; to change that: {remedy}"

    def _clear_crashed(self, key: Key, entries: Sequence[Entry]) -> None:
        """Remove those that have been tried since without ending the process."""
        documents = self._read(key, "crashed")
        reached = {_identity(d) for d in _documents(e for e in entries if e.is_reached)} if documents else ()
        remaining = [d for d in documents if d["is_out"] or _identity(d) not in reached]
        if not remaining:
            self._remove(key, "crashed")
        elif remaining != documents:
            self._write(key, "crashed", remaining)

    # -- files -------------------------------------------------------------------------------------------------------

    def _read(self, key: Key, suffix: str) -> list[dict[str, Any]]:
        try:
            documents = json.loads(self._data(key, suffix) or b"[]")
        except (ValueError, RecursionError):
            return []
        return [d for d in documents if _is_valid(d, suffix)] if isinstance(documents, list) else []

    def _data(self, key: Key, suffix: str) -> bytes | None:
        """The content of a file; None where there is none that can be read."""
        with contextlib.suppress(OSError):
            content = self.files.read((UNFINISHED, f"{key.digest}.{suffix}"))
            return None if content is None else content.data
        return None

    def _write(self, key: Key, suffix: str, documents: list[dict[str, Any]], durably: bool = True) -> None:
        with contextlib.suppress(OSError):
            self.files.write_at((UNFINISHED,), f"{key.digest}.{suffix}", json.dumps(documents).encode(), durably)

    def _remove(self, key: Key, suffix: str) -> None:
        with contextlib.suppress(OSError):
            self.files.unlink((UNFINISHED, f"{key.digest}.{suffix}"))

    def _path(self, key: Key, suffix: str) -> Path:
        return self.files.root / UNFINISHED / f"{key.digest}.{suffix}"


def _try_lock(path: Path) -> int | None:
    """The file, open and locked by this process; None while another process has the lock."""
    descriptor = open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # If the last owner has removed the file, this one has no name, and its lock excludes no other process.
        if os.fstat(descriptor).st_ino == os.lstat(path).st_ino:
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
            with contextlib.suppress(RecordError):  # one without JSON is measured again
                yield {
                    "backend": entry.backend,
                    "config": to_json(entry.cfg),
                    "milliseconds": entry.milliseconds,
                    "reason": entry.reason,
                    "is_checked": entry.is_checked,
                }


def _trial_documents(trials: Sequence[Trial]) -> Iterator[dict[str, Any]]:
    for trial in trials:
        with contextlib.suppress(RecordError):  # one without JSON is not noted
            yield {"backend": trial.backend, "config": to_json(trial.cfg), "step": trial.step}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_time(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and 0 <= value <= MAX_MILLISECONDS)


def _is_step(value: Any) -> bool:
    return isinstance(value, str) and value in PARTICIPLES


#: By the suffix of a file: the fields of its documents, each with what it takes.
_FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "json": {"milliseconds": _is_time, "reason": _is_text, "is_checked": _is_flag},
    "trying": {"step": _is_step},
    "crashed": {
        "step": _is_step,
        "crashes": lambda value: type(value) is int and value > 0,
        "is_out": _is_flag,
        "reason": _is_text,
    },
}


def _is_valid(document: Any, suffix: str) -> bool:
    """Whether this is what ``_write`` has written. A configuration with any other document is measured again."""
    fields = {"backend": _is_text, "config": _is_text, **_FIELDS[suffix]}
    if not isinstance(document, dict) or document.keys() != fields.keys():
        return False
    return all(is_valid(document[name]) for name, is_valid in fields.items())


def _identity(document: dict[str, Any]) -> tuple[str, str]:
    return document["backend"], document["config"]


def _parse(read: Any, key: Key, document: dict[str, Any]) -> Any:
    try:
        return read(key, document)
    except (ValueError, TypeError, LookupError, RecursionError, RecordError):
        return None


def _parse_entry(key: Key, document: dict[str, Any]) -> Entry:
    cfg, milliseconds = _parse_config(key, document), document.get("milliseconds")
    is_checked = document.get("is_checked", False)
    return Entry(document["backend"], cfg, milliseconds, reason=document["reason"], is_checked=is_checked)


def _parse_trial(key: Key, document: dict[str, Any]) -> Trial:
    return Trial(document["backend"], _parse_config(key, document), document["step"])


def _parse_config(key: Key, document: dict[str, Any]) -> Any:
    return from_json(document["config"], kernel_config_type(key.op, document["backend"]) or type(None))
