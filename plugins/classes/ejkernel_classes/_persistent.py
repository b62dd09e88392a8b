"""The cache on disk, for any key and any configuration that a ``ConfigCache`` takes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import attrs

import ejkernel_cache
from ejkernel_cache._names import Place
from ejkernel_core import Candidate, Key, Record, RecordError, as_record

from ._encoding import classes_in, decoded, encoded, is_structured

#: What stands for the operation and the device of a key that is no ``Key``.
ANY = "any"


@attrs.frozen
class Plain:
    """A configuration that is no object with fields, as a text."""

    text: str


class PersistentCache(ejkernel_cache.PersistentCache):
    """Configurations by key, in a folder that processes share: ``ejkernel_cache.PersistentCache`` for any key.

    A key is ``Invocation.key``, or anything hashable that can be written down and read back: numbers, text, dtypes,
    enumerations, and objects of attrs classes and dataclasses, also in tuples and frozensets. A configuration is any of
    these, or a list, a set or a dict. Keys are told apart by their content: 1 and 1.0 are two. ``RecordError`` for what
    cannot be written down, as a function.
    """

    def put(self, key: Hashable, value: Any) -> None:
        """Remember a configuration, or a ``Record`` of one: in the place of what is there for the same backend."""
        record = as_record(value)
        # A kernel's key says of which type its configurations are; any other key says nothing.
        if record.cfg is not None and not (isinstance(key, Key) and is_structured(type(record.cfg))):
            text = json.dumps(encoded(record.cfg))
            self._types.update(classes_in(record.cfg))
            record = attrs.evolve(record, cfg=Plain(text))
        self._types.update(classes_in(key))
        super().put(_as_key(key), record)

    def file(self, key: Hashable, backend: str | None = None) -> Path:
        """Where the record of a key and a backend lies, or would."""
        return super().file(_as_key(key), backend)

    def read(self, key: Hashable, backend: str | None, kind: type | None = None) -> Record | None:
        """The record for exactly this backend, None if there is no file, or ``RecordError`` with the reason."""
        return super().read(_as_key(key), backend, kind)

    def find(self, key: Hashable, candidate: Candidate) -> Record | None:
        """The record for this kernel, the one put last: what a store is asked by ``ejkernel_core.recall``."""
        return super().find(_as_key(key), candidate)

    def records(self, key: Hashable, kind: type | None = None) -> tuple[Record, ...]:
        """The records of every backend, the last one put first; with a ``kind``, those of this type."""
        return super().records(_as_key(key), kind)

    def get(self, key: Hashable, default: Any = None, kind: type | None = None) -> Any:
        """The configuration that was put last, or the default: see ``records``."""
        return super().get(_as_key(key), default, kind)

    def __contains__(self, key: Hashable) -> bool:
        """Whether there is a file, be it readable or not."""
        return super().__contains__(_as_key(key))

    def __iter__(self) -> Iterator[Any]:
        """The keys as they were put; one that names a class that nothing has imported, as a ``Key``."""
        return map(self._as_put, super().__iter__())

    def _as_put(self, key: Key) -> Any:
        if (key.op, key.device) == (ANY, ANY):
            with contextlib.suppress(RecordError):
                return decoded(key.problem, self._types)
        return key

    def _read_record(self, place: Place, key: Key, kind: type | None) -> tuple[int, Record] | None:
        stored = self._read_written_record(place, key, kind)
        if stored is None or not isinstance(stored[1].cfg, Plain):
            return stored
        when, record = stored
        cfg = decoded(record.cfg.text, self._types)
        if kind is not None and not isinstance(cfg, kind):
            raise RecordError(f"{place[3]} holds a {type(cfg).__qualname__}, no {kind.__qualname__}")
        return when, attrs.evolve(record, cfg=cfg)

    def _read_written_record(self, place: Place, key: Key, kind: type | None) -> tuple[int, Record] | None:
        if (key.op, key.device) == (ANY, ANY) or (kind is not None and not is_structured(kind)):
            return super()._read_record(place, key, Plain)
        try:
            return super()._read_record(place, key, kind)
        except RecordError as fault:
            if kind is not None or fault.damaged:
                raise
            with contextlib.suppress(RecordError):  # it may be no object with fields
                return super()._read_record(place, key, Plain)
            raise


def _as_key(key: Hashable) -> Key:
    if isinstance(key, Key):
        return key
    hash(key)  # a TypeError, as in a ``ConfigCache``
    # As ``stable_json`` writes it, which would write the marks for what JSON has no word for down a second time.
    problem = json.dumps(encoded(key), sort_keys=True, separators=(",", ":"))
    return Key(ANY, ANY, problem)
