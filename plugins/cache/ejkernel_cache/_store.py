"""The cache on disk: the interface of ``ejkernel_core.ConfigCache`` for a folder."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ejkernel_core import Candidate, Key, Record, RecordError, as_record, matching_record, record_to_json
from ejkernel_core.extend import printable, type_name

from ._contents import Document, document_of, is_better
from ._directory import UNFINISHED, Content, Directory
from ._documents import LIMIT, read_record, rebuilt_key, software_in, text_of
from ._names import Place, below, component, place_of, stem_of
from ._trust import CacheWarning

if TYPE_CHECKING:
    from ._unfinished import Unfinished

VARIABLE = "EJKERNEL_CACHE_DIR"


class PersistentCache:
    """Configurations by ``Key``, one file each in a folder, which all processes that use it share.

    ``path`` is the folder; by default it is EJKERNEL_CACHE_DIR, or else one in the user's cache folder. It is chosen
    and made on first use. A file chooses values, and no class: a configuration is of its kernel's ``Config``, of
    ``kind``, or of a type that was stored through this object.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = path
        #: The types of the configurations that were stored, by the name of the kernel or the type.
        self._types: dict[str, type] = {}
        self._keys: dict[Place, Key | None] = {}
        self._has_warned = False
        #: The number of changes that were made through this object.
        self.generation = 0

    @functools.cached_property
    def path(self) -> Path:
        """The folder."""
        path = self._path or os.environ.get(VARIABLE) or _user_folder()
        return Path(os.path.abspath(os.path.expanduser(path)))

    @functools.cached_property
    def _files(self) -> Directory:
        files = Directory(self.path, expects_trust=True)
        files.expect_trusted()
        files.sweep()
        return files

    @functools.cached_property
    def unfinished(self) -> Unfinished:
        """The unfinished measurements."""
        # Imported here, because most programs only read records.
        from ._unfinished import Unfinished

        return Unfinished(self._files)

    def crashes(self, key: Key) -> str:
        """The configurations that ended processes that measured this call, in words; "" for none."""
        if not any(self._files.has((UNFINISHED, f"{key.digest}.{kind}")) for kind in ("crashed", "trying")):
            return ""
        return self.unfinished.describe_crashes(key)

    def forget_crashes(self) -> None:
        """Allow all configurations that ended processes to be tried again.

        One that is excluded in a record stays excluded until the call is measured again, as ``autotune`` does.
        """
        for name in self._files.names(UNFINISHED):
            if name.endswith(".crashed"):  # the other files belong to running measurements
                with contextlib.suppress(OSError):
                    self._files.unlink((UNFINISHED, name))

    def file(self, key: Key, backend: str | None = None) -> Path:
        """The path of the record of a key and a backend, whether there is one or not."""
        return below(self.path, place_of(_check_key(key), backend))

    # -- writing -----------------------------------------------------------------------------------------------------

    def put(self, key: Key, value: Any) -> OSError | None:
        """Store a configuration, or a ``Record`` of one. It replaces the record for the same backend, unless that was
        measured with other versions.

        ``RecordError`` if it cannot be written as JSON. A folder that cannot be written to gives one warning, and the
        reason is returned.
        """
        record = as_record(value)
        data = record_to_json(_check_key(key), record).encode()
        if len(data) > LIMIT:
            raise RecordError(f"a record of {len(data)} bytes is too large to be kept; {LIMIT} is the most")
        if record.cfg is not None:
            config_type = type(record.cfg)
            name = type_name(config_type) if record.backend is None else f"{key.op}.{record.backend}"
            self._types[name] = config_type
        self.generation += 1
        try:
            self._keep_other_versions(key, record)
            self._files.write(place_of(key, record.backend), data)
        except OSError as fault:
            self._warn_once(fault)
            return fault
        return None

    def _keep_other_versions(self, key: Key, record: Record) -> None:
        """Before it is replaced, move a record of other versions to a file of its own: they may be installed again."""
        # What another process writes in between is lost. The lock of a measurement excludes that, because it is the
        # same for all versions. Two processes that store by hand, or without locks, are not excluded.
        software = record.provenance and record.provenance.software
        with contextlib.suppress(OSError):
            content = self._files.read(place_of(key, record.backend)) if software else None
            old_software = content and software_in(content.data)
            if content and old_software and old_software != software:
                self._files.write(place_of(key, record.backend, old_software), content.data)

    def clear(self) -> None:
        """Remove all records. Damaged files that were moved aside stay."""
        try:
            self.remove(lambda key: True)
        except OSError as fault:
            self._warn_once(fault)

    def remove(self, is_selected: Callable[[Key | None], bool]) -> int:
        """Remove the records of the keys that are selected, and return how many there were. The key of a file that
        cannot be read is None. ``OSError`` if one cannot be removed.
        """
        self.generation += 1
        count = 0
        for place in list(self._files.places()):
            if is_selected(self._key_at(place)):
                self._files.remove(place)
                count += 1
        return count

    def merge(self, document: Document) -> str:
        """Put a record of another cache into this one, and return what became of it: "added"; "replaced", where it is
        better than the one of the same call, backend and versions; "kept", where it is not; or "same".

        Its configuration is not read, so its kernel need not be installed. ``OSError`` if it cannot be written.
        """
        key, software = document.key, document.provenance.software if document.provenance else None
        place = place_of(key, document.backend)
        stored = self._document_at(place, key)
        if stored and stored.provenance and software not in (None, stored.provenance.software):
            place = place_of(key, document.backend, software)  # records of other versions stay
            stored = self._document_at(place, key)
        if stored is not None and stored.text == document.text:
            return "same"
        if stored is not None and not is_better(document.provenance, stored.provenance):
            return "kept"
        self.generation += 1
        self._files.write(place, document.text.encode())
        return "added" if stored is None else "replaced"

    def _document_at(self, place: Place, key: Key) -> Document | None:
        """The record in a file, whatever its configuration is; None where there is none that can be read."""
        try:
            content = self._files.read(place)
            return document_of(text_of(content.data), "", key) if content else None
        except (OSError, RecordError):
            return None

    def write_fault(self) -> OSError | None:
        """Why nothing can be stored in the folder; None where something can. The folder is made."""
        try:
            self._files.try_to_write()
        except OSError as fault:
            return fault
        return None

    def _warn_once(self, fault: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _warn(f"{self.path} cannot be written to ({fault}); set {VARIABLE} to a folder that can be")

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, key: Key, backend: str | None, kind: type | None = None) -> Record | None:
        """The record for exactly this backend; None if there is no file. ``RecordError`` if it cannot be read."""
        stored = self._read_record(place_of(_check_key(key), backend), key, kind)
        return stored and stored[1]

    def predecessor(self, key: Key, record: Record) -> Record | None:
        """The record that this one would replace: one put there by hand, or measured with the same versions.
        ``RecordError`` if it cannot be read.
        """
        software = record.provenance and record.provenance.software
        stored = self._read_record(place_of(key, record.backend), key, type(record.cfg))
        if stored and software and stored[1].provenance and stored[1].provenance.software != software:
            stored = self._read_record(place_of(key, record.backend, software), key, type(record.cfg))
        return stored and stored[1]

    def near(self, key: Key) -> list[Key]:
        """The keys of the same ``kind``: they differ only in the sizes of axes that count things."""
        device, op = component(_check_key(key).device), component(key.op)
        places = [place for place in self._files.places_in(device, op) if place[3].startswith(f"{key.kind}-")]
        for place in places:
            if place not in self._keys:  # the name of a file depends on its key, so the key never changes
                self._keys[place] = self._key_at(place)
        return list(dict.fromkeys(other for place in places if (other := self._keys[place])))

    def find(self, key: Key, candidate: Candidate) -> Record | None:
        """The latest record for the candidate's kernel, or None. ``ejkernel_core.recall`` calls this method."""
        backends, versions = (candidate.backend, None), (None, candidate.software)
        # Without listing the folder, which may have many files.
        places = [place_of(_check_key(key), backend, software) for backend in backends for software in versions]
        records, faults = self._read_records(places, key, candidate.config_type or type(None))
        record = matching_record(records, candidate)
        if record is None and faults:
            raise RecordError(_join_faults(faults))
        return record

    def records(self, key: Key, kind: type | None = None) -> tuple[Record, ...]:
        """The records of all backends, the latest first. With a ``kind``, those of this type.

        Without one, the type is that of the kernel's configurations. If there are files and none can be read, a
        ``CacheWarning`` has the reasons.
        """
        records, faults = self._read_records(self._places(_check_key(key)), key, kind)
        if faults and not records:
            _warn(_join_faults(faults))
        return records

    def get(self, key: Key, default: Any = None, kind: type | None = None) -> Any:
        """The configuration that was stored last, or the default: see ``records``."""
        records = self.records(key, kind)
        return records[0].cfg if records else default

    def _read_records(
        self, places: list[Place], key: Key, kind: type | None
    ) -> tuple[tuple[Record, ...], list[RecordError]]:
        entries, faults = [], []
        for place in places:
            try:
                entry = self._read_record(place, key, kind)
            except RecordError as fault:
                faults.append(fault)
            else:
                entries += [entry] if entry else []
        entries.sort(key=lambda item: item[0], reverse=True)
        return tuple(record for _, record in entries), faults

    def _read_record(self, place: Place, key: Key, kind: type | None) -> tuple[int, Record] | None:
        """The time when a record was stored, and the record; None if there is no file."""
        try:
            content = self._files.read(place)
        except OSError as fault:
            raise RecordError(f"{fault.filename or below(self.path, place)}: {fault.strerror or fault}") from fault
        if content is None:
            return None
        try:
            record = read_record(text_of(content.data), key, kind, self._types)
        except RecordError as fault:
            note = self._set_aside(place, content, fault) if fault.damaged else ""
            raise RecordError(f"{below(self.path, place)}: {fault}{note}", damaged=fault.damaged) from fault
        if component(record.backend) != place[2]:
            raise RecordError(f"{below(self.path, place)}: is for backend {record.backend!r}")
        return content.when, record

    def _set_aside(self, place: Place, content: Content, reason: RecordError) -> str:
        try:
            new_path = self._files.set_aside(place, content)
        except OSError as fault:
            return f" (and cannot be moved aside: {fault})"
        if new_path is None:  # another process has moved it, and warns
            return ""
        _warn(f"{below(self.path, place)} is damaged ({reason}) and is not used; it was moved to {new_path}")
        return f" (moved to {new_path})"

    # -- everything --------------------------------------------------------------------------------------------------

    def items(self) -> list[tuple[Key, tuple[Record, ...]]]:
        """All keys with their records."""
        pairs = ((key, self.records(key)) for key in self)
        return [(key, records) for key, records in pairs if records]

    def __contains__(self, key: Key) -> bool:
        """Whether there is a file for the key, readable or not."""
        return any(map(self._files.has, self._places(_check_key(key))))

    def _places(self, key: Key) -> list[Place]:
        """The places of a key's latest records, one for each backend that has a folder."""
        device, op, _, name = place_of(key, None)
        return [(device, op, backend, name) for backend in self._files.backends(device, op)]

    def __len__(self) -> int:
        """The number of keys with files."""
        return len({(device, op, stem_of(name)) for device, op, _, name in self._files.places()})

    def __iter__(self) -> Iterator[Key]:
        """The keys, read from the files."""
        return iter(dict.fromkeys(key for key in map(self._key_at, list(self._files.places())) if key))

    def _key_at(self, place: Place) -> Key | None:
        try:
            content = self._files.read(place)
            return rebuilt_key(text_of(content.data), place) if content else None
        except (OSError, RecordError):
            return None

    def __repr__(self) -> str:
        return f"PersistentCache({str(self.path)!r})"


@functools.cache
def default_cache() -> PersistentCache:
    """The cache of the policy ``cache``: one for the process, made on first use."""
    return PersistentCache()


def _user_folder() -> str:
    # Imported here, because it is not needed where the folder is given.
    import platformdirs

    return os.path.join(platformdirs.user_cache_dir("ejkernel", appauthor=False), "configs")


def _check_key(key: Any) -> Key:
    if not isinstance(key, Key):
        raise TypeError(f"a key is an ejkernel_core.Key, as Invocation.key is; got {type(key).__name__}")
    return key


def _join_faults(faults: list[RecordError]) -> str:
    return "; ".join(dict.fromkeys(map(str, faults)))


def _warn(message: str) -> None:
    warnings.warn(printable(f"ejkernel-cache: {message}"), CacheWarning, stacklevel=4)
