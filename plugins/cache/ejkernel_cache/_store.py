"""The cache that stays: the interface of ``ejkernel_core.ConfigCache`` over one folder."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ejkernel_core import Candidate, Key, Record, RecordError, as_record, fitting, record_to_json

from ._directory import UNFINISHED, Content, Directory
from ._documents import LIMIT, decoded, rebuilt_key, software_in, text_of
from ._names import Place, below, component, place_of, stem_of

if TYPE_CHECKING:
    from ._unfinished import Unfinished

VARIABLE = "EJKERNEL_CACHE_DIR"


class CacheWarning(RuntimeWarning):
    """Something is wrong with the files of a cache. The program goes on as if they were not there."""


class PersistentCache:
    """Configurations by ``Key``, in a folder: one file each, shared by all processes that use the folder.

    ``path`` is the folder; by default EJKERNEL_CACHE_DIR, or else a folder of the user's. It is decided on, and made,
    when it is first needed. Of what a file names, nothing is imported but a kernel that is installed under that name.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._given = path
        #: Of what was put here: by kernels, and by their own names.
        self._types: dict[str, type] = {}
        self._keys: dict[Place, Key | None] = {}
        self._has_warned = False
        #: Grows with every change that is made through this object.
        self.generation = 0

    @functools.cached_property
    def path(self) -> Path:
        """The folder."""
        given = self._given or os.environ.get(VARIABLE) or _user_folder()
        return Path(os.path.abspath(os.path.expanduser(given)))

    @functools.cached_property
    def _files(self) -> Directory:
        files = Directory(self.path)
        files.sweep()
        return files

    @functools.cached_property
    def unfinished(self) -> Unfinished:
        """The measurements under way."""
        # Imported here: who only looks something up has nothing to do with measuring.
        from ._unfinished import Unfinished

        return Unfinished(self._files)

    def dangers(self, key: Key) -> str:
        """What took processes with it that measured this, in words; "" for nothing."""
        if not any((self.path / UNFINISHED / f"{key.digest}.{kind}").exists() for kind in ("died", "trying")):
            return ""
        return self.unfinished.told(key)

    def forgive(self) -> None:
        """Have everything tried again, whatever processes have died of.

        What is out in a record stays so until the call is measured anew, as ``autotune`` does.
        """
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(self.path / UNFINISHED)):
                if entry.name.endswith(".died"):  # what is being tried at this moment is another's
                    os.unlink(entry)

    def file(self, key: Key, backend: str | None = None) -> Path:
        """Where the record of a key and a backend lies, or would."""
        return below(self.path, place_of(_checked(key), backend))

    # -- writing -----------------------------------------------------------------------------------------------------

    def put(self, key: Key, value: Any) -> None:
        """Remember a configuration, or a ``Record`` of one: in the place of what is there for the same backend, but for
        what was measured with other versions.

        ``RecordError`` if it cannot be written down. A folder that cannot be written to is told once, and put up with.
        """
        record = as_record(value)
        data = record_to_json(_checked(key), record).encode()
        if len(data) > LIMIT:
            raise RecordError(f"a record of {len(data)} bytes is too large to be kept; {LIMIT} is the most")
        if record.cfg is not None:
            kind = type(record.cfg)
            own_name = f"{kind.__module__}.{kind.__qualname__}"
            self._types[own_name if record.backend is None else f"{key.op}.{record.backend}"] = kind
        self.generation += 1
        try:
            self._keep_other_versions(key, record)
            self._files.write(place_of(key, record.backend), data)
        except OSError as fault:
            self._warn_once(fault)

    def _keep_other_versions(self, key: Key, record: Record) -> None:
        """What other versions have measured gets a place of its own before its own is taken: they may come back."""
        software = record.provenance and record.provenance.software
        with contextlib.suppress(OSError):
            content = self._files.read(place_of(key, record.backend)) if software else None
            before = content and software_in(content.data)
            if content and before and before != software:
                self._files.write(place_of(key, record.backend, before), content.data)

    def clear(self) -> None:
        """Remove every record. What was damaged and moved aside stays."""
        self.generation += 1
        try:
            for place in list(self._files.places()):
                self._files.remove(place)
        except OSError as fault:
            self._warn_once(fault)

    def _warn_once(self, fault: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _warn(f"{self.path} cannot be written to ({fault}); set {VARIABLE} to a folder that can be")

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, key: Key, backend: str | None, kind: type | None = None) -> Record | None:
        """The record for exactly this backend, None if there is no file, or ``RecordError`` with the reason."""
        found = self._found(place_of(_checked(key), backend), key, kind)
        return found and found[1]

    def predecessor(self, key: Key, record: Record) -> Record | None:
        """What this record would take the place of: there by hand, or measured with the same versions. ``RecordError``
        with the reason.
        """
        software = record.provenance and record.provenance.software
        found = self._found(place_of(key, record.backend), key, type(record.cfg))
        if found and software and found[1].provenance and found[1].provenance.software != software:
            found = self._found(place_of(key, record.backend, software), key, type(record.cfg))
        return found and found[1]

    def near(self, key: Key) -> list[Key]:
        """The keys of the same ``kind``: they differ in axes that only count things."""
        device, op = component(_checked(key).device), component(key.op)
        places = [place for place in self._files.places_in(device, op) if place[3].startswith(f"{key.kind}-")]
        for place in places:
            if place not in self._keys:  # its name is its content's, so it stays what it is
                self._keys[place] = self._key_at(place)
        return list(dict.fromkeys(known for place in places if (known := self._keys[place])))

    def find(self, key: Key, candidate: Candidate) -> Record | None:
        """The record for this kernel, the one put last: what a store is asked by ``ejkernel_core.recall``."""
        backends, versions = (candidate.backend, None), (None, candidate.software)
        # Without looking at what is in the folder, which may be full.
        places = [place_of(_checked(key), backend, software) for backend in backends for software in versions]
        records, faults = self._gathered(places, key, candidate.config_type)
        record = fitting(records, candidate)
        if record is None and faults:
            raise RecordError(_told(faults))
        return record

    def records(self, key: Key, kind: type | None = None) -> tuple[Record, ...]:
        """The records of every backend, the last one put first; with a ``kind``, those of this type.

        Without one, the type is that of the kernel's configurations. If there is nothing but what cannot be read, a
        ``CacheWarning`` says why.
        """
        records, faults = self._gathered(self._places(_checked(key)), key, kind)
        if faults and not records:
            _warn(_told(faults))
        return records

    def get(self, key: Key, default: Any = None, kind: type | None = None) -> Any:
        """The configuration that was put last, or the default: see ``records``."""
        records = self.records(key, kind)
        return records[0].cfg if records else default

    def _gathered(
        self, places: list[Place], key: Key, kind: type | None
    ) -> tuple[tuple[Record, ...], list[RecordError]]:
        found, faults = [], []
        for place in places:
            try:
                one = self._found(place, key, kind)
            except RecordError as fault:
                faults.append(fault)
            else:
                found += [one] if one else []
        found.sort(key=lambda item: item[0], reverse=True)
        return tuple(record for _, record in found), faults

    def _found(self, place: Place, key: Key, kind: type | None) -> tuple[int, Record] | None:
        """When it was put, and the record."""
        try:
            content = self._files.read(place)
        except OSError as fault:
            raise RecordError(f"{fault.filename or below(self.path, place)}: {fault.strerror or fault}") from fault
        if content is None:
            return None
        try:
            record = decoded(text_of(content.data), key, kind, self._types)
        except RecordError as fault:
            aside = self._set_aside(place, content, fault) if fault.damaged else ""
            raise RecordError(f"{below(self.path, place)}: {fault}{aside}", damaged=fault.damaged) from fault
        if component(record.backend) != place[2]:
            raise RecordError(f"{below(self.path, place)}: is for backend {record.backend!r}")
        return content.when, record

    def _set_aside(self, place: Place, content: Content, why: RecordError) -> str:
        try:
            aside = self._files.set_aside(place, content)
        except OSError as fault:
            return f" (and cannot be moved aside: {fault})"
        if aside is None:  # another process was quicker, and tells
            return ""
        _warn(f"{below(self.path, place)} is damaged ({why}) and is not used; it was moved to {aside}")
        return f" (moved to {aside})"

    # -- everything --------------------------------------------------------------------------------------------------

    def items(self) -> list[tuple[Key, tuple[Record, ...]]]:
        """Every key with its records."""
        found = ((key, self.records(key)) for key in self)
        return [(key, records) for key, records in found if records]

    def __contains__(self, key: Key) -> bool:
        """Whether there is a file, be it readable or not."""
        return any(map(self._files.has, self._places(_checked(key))))

    def _places(self, key: Key) -> list[Place]:
        """Where the records of a key lie that were put last, one for each backend that there is anything of."""
        device, op, _, name = place_of(key, None)
        return [(device, op, backend, name) for backend in self._files.backends(device, op)]

    def __len__(self) -> int:
        """The number of keys that there are files for."""
        return len({(device, op, stem_of(name)) for device, op, _, name in self._files.places()})

    def __iter__(self) -> Iterator[Key]:
        """The keys, as the files tell them."""
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
    """The one that the policy ``cache`` uses: one for the process, made on first use."""
    return PersistentCache()


def _user_folder() -> str:
    # Imported here: who says where never needs it.
    import platformdirs

    return os.path.join(platformdirs.user_cache_dir("ejkernel", appauthor=False), "configs")


def _checked(key: Any) -> Key:
    if not isinstance(key, Key):
        raise TypeError(f"a key is an ejkernel_core.Key, as Invocation.key is; got {type(key).__name__}")
    return key


def _told(faults: list[RecordError]) -> str:
    return "; ".join(dict.fromkeys(map(str, faults)))


def _warn(message: str) -> None:
    warnings.warn(f"ejkernel-cache: {message}", CacheWarning, stacklevel=4)
