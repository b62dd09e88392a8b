"""Configurations in memory."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from ._display import brief, quantity
from ._kernel import Candidate, find_record
from ._keys import Key
from ._records import Record, as_record


class ConfigCache:
    """Configurations by key, in memory; safe to share between threads.

    A key is ``Invocation.key`` (or anything hashable), a value a ``Record`` or a configuration. With ``maxsize``, the
    least recently used key is dropped first.
    """

    def __init__(self, maxsize: int | None = None) -> None:
        if maxsize is not None and type(maxsize) is not int:
            raise TypeError(f"maxsize: takes a whole number, or None for no bound; got {brief(maxsize)}")
        if maxsize is not None and maxsize < 1:
            raise ValueError(f"maxsize: takes at least 1, or None for no bound; got {maxsize}")
        self.maxsize = maxsize
        #: Grows with every change.
        self.generation = 0
        self._lock = threading.Lock()
        self._records: OrderedDict[Hashable, tuple[Record, ...]] = OrderedDict()
        self._listeners: set[weakref.WeakMethod[Callable[[Hashable], None]]] = set()

    def notify(self, listener: Callable[[Hashable], None]) -> None:
        """Call this bound method with the key after every change, for as long as its object exists."""
        self._listeners.add(weakref.WeakMethod(listener, self._listeners.discard))

    def put(self, key: Hashable, value: Any) -> None:
        """Store a configuration, or a ``Record`` of one. It replaces the record for the same backend."""
        record, keys = as_record(value), [key]
        with self._lock:
            others = (r for r in self._records.pop(key, ()) if r.backend != record.backend)
            self._records[key] = (record, *others)
            self.generation += 1
            if self.maxsize is not None and len(self._records) > self.maxsize:
                keys.append(self._records.popitem(last=False)[0])
        self._call_listeners(keys)

    def get(self, key: Hashable, default: Any = None) -> Any:
        """The configuration that was stored last, or the default."""
        records = self.records(key)
        return records[0].cfg if records else default

    def records(self, key: Hashable) -> tuple[Record, ...]:
        """The records of all backends, the latest first."""
        with self._lock:
            if key in self._records:
                self._records.move_to_end(key)
            return self._records.get(key, ())

    def find(self, key: Hashable, candidate: Candidate) -> Record | None:
        """The record for the candidate's kernel, or None; ``recall`` calls this method of stores."""
        return find_record(self.records(key), candidate)

    def near(self, key: Key) -> list[Key]:
        """The keys of the same ``kind``: they differ only in the sizes of axes that count things."""
        with self._lock:
            keys = [other for other in self._records if isinstance(other, Key)]
        return [other for other in keys if (other.op, other.device, other.kind) == (key.op, key.device, key.kind)]

    def items(self) -> list[tuple[Hashable, tuple[Record, ...]]]:
        """Every key with its records."""
        with self._lock:
            return list(self._records.items())

    def clear(self) -> None:
        """Remove everything."""
        with self._lock:
            keys = list(self._records)
            self._records.clear()
            self.generation += 1
        self._call_listeners(keys)

    def _call_listeners(self, keys: list[Hashable]) -> None:
        # Without the lock, because a listener may read the cache.
        for listener in [reference() for reference in tuple(self._listeners)]:
            for key in keys:
                if listener is not None:
                    listener(key)

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._records

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        bound = "" if self.maxsize is None else f", at most {self.maxsize}"
        return f"ConfigCache({quantity(len(self), 'key')}{bound})"

    def __iter__(self) -> Iterator[Hashable]:
        return iter([key for key, _ in self.items()])
