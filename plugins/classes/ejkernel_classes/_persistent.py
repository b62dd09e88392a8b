"""The cache on disk, for the keys and configurations that a ``ConfigCache`` takes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

import ejkernel_cache
from ejkernel_cache._names import Place
from ejkernel_core import Candidate, Key, Record, RecordError, as_record
from ejkernel_core.extend import type_name

from ._encoding import classes_in, decode_text, encode, is_structured

#: The operation and the device in the ``Key`` for any other key.
ANY = "any"


@attrs.frozen
class Plain:
    """The text of a configuration that is not an object with fields."""

    text: str


class PersistentCache(ejkernel_cache.PersistentCache):
    """Configurations by key, in a folder that processes share: ``ejkernel_cache.PersistentCache`` for any key.

    A key is ``Invocation.key``, or any hashable value that can be written and read back: numbers, text, dtypes,
    enumerations, and objects of attrs classes and dataclasses, also in tuples and frozensets. A configuration is any of
    these, or a list, a set or a dict. Keys differ by content: 1 and 1.0 are two keys. Other values, such as functions,
    raise ``RecordError``.

    A file never chooses a class. Those of keys and configurations that other processes have stored are given in
    ``types``; a kernel's own are known.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, types: Iterable[type] = ()) -> None:
        super().__init__(path)
        self._types.update((type_name(kind), kind) for kind in types)

    def put(self, key: Hashable, value: Any) -> None:
        """Store a configuration, or a ``Record`` of one. It replaces the record for the same backend."""
        record = as_record(value)
        # A ``Key`` gives the type of the configuration, by its kernel. Another key does not.
        if record.cfg is not None and not (isinstance(key, Key) and is_structured(type(record.cfg))):
            text = json.dumps(encode(record.cfg))
            self._types.update(classes_in(record.cfg))
            record = attrs.evolve(record, cfg=Plain(text))
        self._types.update(classes_in(key))
        super().put(_as_key(key), record)

    def file(self, key: Hashable, backend: str | None = None) -> Path:
        """The path of the record of a key and a backend, whether there is one or not."""
        return super().file(_as_key(key), backend)

    def read(self, key: Hashable, backend: str | None, kind: type | None = None) -> Record | None:
        """The record for exactly this backend; None if there is no file. ``RecordError`` if it cannot be read."""
        return super().read(_as_key(key), backend, kind)

    def find(self, key: Hashable, candidate: Candidate) -> Record | None:
        """The latest record for the candidate's kernel, or None. ``ejkernel_core.recall`` calls this method."""
        self._types.update(classes_in(candidate.cfg))
        return super().find(_as_key(key), candidate)

    def records(self, key: Hashable, kind: type | None = None) -> tuple[Record, ...]:
        """The records of all backends, the latest first. With a ``kind``, those of this type."""
        return super().records(_as_key(key), kind)

    def get(self, key: Hashable, default: Any = None, kind: type | None = None) -> Any:
        """The configuration that was stored last, or the default: see ``records``."""
        return super().get(_as_key(key), default, kind)

    def __contains__(self, key: Hashable) -> bool:
        """Whether there is a file for the key, readable or not."""
        return super().__contains__(_as_key(key))

    def __iter__(self) -> Iterator[Any]:
        """The keys that were stored. One with a class that is not known here is a ``Key``."""
        return map(self._original_key, super().__iter__())

    def _original_key(self, key: Key) -> Any:
        if (key.op, key.device) == (ANY, ANY):
            with contextlib.suppress(RecordError):
                return decode_text(key.problem, self._types)
        return key

    def _read_record(self, place: Place, key: Key, kind: type | None) -> tuple[int, Record] | None:
        stored = self._read_written_record(place, key, kind)
        if stored is None or not isinstance(stored[1].cfg, Plain):
            return stored
        when, record = stored
        cfg = decode_text(record.cfg.text, self._types | ({} if kind is None else {type_name(kind): kind}))
        if kind is not None and not isinstance(cfg, kind):
            raise RecordError(f"{place[3]} holds a {type(cfg).__qualname__}, no {kind.__qualname__}")
        return when, attrs.evolve(record, cfg=cfg)

    def _read_written_record(self, place: Place, key: Key, kind: type | None) -> tuple[int, Record] | None:
        if (key.op, key.device) == (ANY, ANY) or (kind not in (None, type(None)) and not is_structured(kind)):
            return super()._read_record(place, key, Plain)
        try:
            return super()._read_record(place, key, kind)
        except RecordError as fault:
            if kind is not None or fault.damaged:
                raise
            with contextlib.suppress(RecordError):  # the configuration may not be an object with fields
                return super()._read_record(place, key, Plain)
            raise


def _as_key(key: Hashable) -> Key:
    if isinstance(key, Key):
        return key
    hash(key)  # raises TypeError, as a ``ConfigCache`` does
    # The same format as ``stable_json``, which would encode the tags of ``encode`` a second time.
    problem = json.dumps(encode(key), sort_keys=True, separators=(",", ":"))
    return Key(ANY, ANY, problem)
