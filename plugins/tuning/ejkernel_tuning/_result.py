"""The results of tuning: a table, JSON, an overlay."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import jax

from ejkernel_core import Key, Provenance, Record, RecordError, overlay_cache, record_from_json, record_to_json
from ejkernel_core.extend import (
    SCHEMA,
    Entry,
    Reason,
    config_text,
    device_name,
    html_table,
    html_text,
    one_line,
    processor,
    quantity,
)

#: The columns of the table of one result.
COLUMNS = ("", "backend", "configuration", "ms", "spread", "out because")


@attrs.frozen
class Tuned:
    """The result for one invocation."""

    #: The exact key, and that of its bucket.
    keys: tuple[Key, ...]
    description: str
    #: The best one first, then by time, then those without a time.
    entries: tuple[Entry, ...]
    #: The best record of every backend, the fastest first; none if there is no best configuration.
    records: tuple[Record, ...]
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    #: The same by bursts, the best one first, where that was asked for and the times are those under load.
    burst_ranking: tuple[Entry, ...] = ()

    @property
    def best(self) -> Entry | None:
        """The best configuration; None where there is none."""
        return self.entries[0] if self.records else None

    def __repr__(self) -> str:
        best = self.best
        winner = "no result" if best is None else f"{best.backend} with {config_text(best.cfg)}{_time(best)}"
        return f"Tuned({one_line(f'{self.keys[0].op}: {winner}')})"

    def _rows(self) -> list[tuple[str, ...]]:
        """A row for each configuration, under ``COLUMNS``."""
        return [
            (
                "*" if self.records and number == 0 else "",
                entry.backend,
                config_text(entry.cfg) + (" (heuristic)" if entry.is_usual else ""),
                "" if entry.milliseconds is None else f"{entry.milliseconds:.4g}",
                "" if entry.spread is None else f"{entry.spread:.2g}",
                entry.reason,
            )
            for number, entry in enumerate(self.entries)
        ]

    @property
    def _title(self) -> str:
        return f"{self.description}, in {self.seconds:.1f} s"

    def __str__(self) -> str:
        return "\n".join([self._title, *_table(COLUMNS, self._rows()), *(f"  {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        notes = "\n".join(self.notes)
        return html_table(self._title, self._rows(), COLUMNS) + (html_text(notes) if notes else "")


@attrs.frozen
class TuningResult:
    """Results of tuning. ``with result:`` is an overlay. ``result | other`` has both; of equal calls, the other's."""

    tuned: tuple[Tuned, ...] = ()

    @property
    def best(self) -> Entry:
        """The best configuration of the one call; ``LookupError`` where there are several calls, or no result."""
        if len(self.tuned) != 1:
            raise LookupError(f"there are {len(self.tuned)} results: see result.tuned")
        best = self.tuned[0].best
        if best is None:
            raise LookupError(f"nothing could be measured:\n{self}")
        return best

    @property
    def cfg(self) -> Any:
        """The value of the best configuration."""
        return self.best.cfg

    def record_for(self, op: str, backend: str | None = None) -> Record:
        """The fastest record of the one call, which is of ``op``; with a ``backend``, the fastest of this one."""
        ops = [tuned.keys[0].op for tuned in self.tuned]
        if ops != [op]:
            held = ", ".join(ops) or "no call"
            raise TypeError(f"{op}: takes a TuningResult of {op} alone as cfg; this is of {held}: use 'with result:'")
        self.best  # noqa: B018  # raises where nothing could be measured
        records = self.tuned[0].records
        record = next((record for record in records if backend in (None, record.backend)), None)
        if record is None:
            backends = ", ".join(repr(record.backend) for record in records)
            raise TypeError(f"{op}: cfg is a TuningResult of the backends {backends}; it has none of {backend!r}")
        return record

    def items(self) -> list[tuple[Key, tuple[Record, ...]]]:
        """The records by key, as a store has them."""
        return [(key, tuned.records) for tuned in self.tuned if tuned.records for key in tuned.keys]

    def __or__(self, other: TuningResult) -> TuningResult:
        other_keys = {one.keys[0] for one in other.tuned}
        return TuningResult((*(one for one in self.tuned if one.keys[0] not in other_keys), *other.tuned))

    def __repr__(self) -> str:
        winners = ", ".join(map(_winner_text, self.tuned))
        return f"TuningResult({one_line(': '.join(filter(None, (quantity(len(self.tuned), 'result'), winners))))})"

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tuned)) or "nothing was tuned"

    def _repr_html_(self) -> str:
        return "".join(tuned._repr_html_() for tuned in self.tuned) or html_text(self)

    # -- as an overlay -------------------------------------------------------------------------------------------

    def __enter__(self) -> TuningResult:
        self._check_device()
        self._overlay.__enter__()
        return self

    def __exit__(self, *fault: Any) -> None:
        self._overlay.__exit__(*fault)

    @functools.cached_property
    def _overlay(self) -> contextlib.AbstractContextManager[None]:
        return overlay_cache(self)

    def _check_device(self) -> None:
        local = {*map(device_name, jax.local_devices()), processor()}
        measured = {key.device for key, _ in self.items()}
        if measured and not measured & local:
            raise ValueError(
                f"this was measured on {', '.join(sorted(measured))}, and here there are {', '.join(sorted(local))}: "
                "what is best on one is not on the other"
            )

    # -- as text -------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The records with their provenance as text, to use them in another process."""
        documents = [
            {
                "keys": [_key(key) for key in one.keys],
                "records": [json.loads(record_to_json(one.keys[0], r)) for r in one.records],
            }
            for one in self.tuned
        ]
        return json.dumps({"schema": SCHEMA, "tuned": documents}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, config_type: Callable[[str, str], type | None] | None = None) -> TuningResult:
        """Read what ``to_json`` wrote. ``config_type(op, backend)`` returns the type of a kernel's configurations; by
        default it is that of the installed kernel. ``RecordError`` says what cannot be read.
        """
        config_type_of = config_type or (lambda op, backend: None)
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise RecordError(f"$.schema is {data['schema']!r}; this version reads {SCHEMA}")
            return cls(tuple(_read(document, config_type_of) for document in data["tuned"]))
        except RecordError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as fault:
            raise RecordError(f"no tuning result: {type(fault).__name__}: {fault}", damaged=True) from fault


def _winner_text(tuned: Tuned) -> str:
    best = tuned.best
    return f"{tuned.keys[0].op} " + ("without a result" if best is None else f"by {best.backend}{_time(best)}")


def _time(entry: Entry) -> str:
    return "" if entry.milliseconds is None else f" in {entry.milliseconds:.3g} ms"


def _key(key: Key) -> dict[str, Any]:
    return attrs.asdict(key)


def _read(document: Any, config_type_of: Callable[[str, str], type | None]) -> Tuned:
    keys = tuple(Key(**key) for key in document["keys"])
    texts = [(json.dumps(record), str(record["kernel"])) for record in document["records"]]
    records = tuple(record_from_json(text, keys[0], _type_of(kernel, config_type_of)) for text, kernel in texts)
    entries = tuple(
        Entry(record.backend or "", record.cfg, record.provenance.milliseconds if record.provenance else None)
        for record in records
    )
    return Tuned(keys, f"{keys[0]} on {keys[0].device}, read from JSON", entries, records)


def _type_of(kernel: str, config_type_of: Callable[[str, str], type | None]) -> type | None:
    import ejkernel_core

    op, _, backend = kernel.rpartition(".")
    return config_type_of(op, backend) or ejkernel_core.config_type(kernel)


def records_of(entries: Iterable[Entry], provenance: Callable[[Entry], Provenance]) -> tuple[Record, ...]:
    """The records of the best entry, which is the first one, and of the best entry of every other backend."""
    winner, *others = entries
    best = {winner.backend: Record(winner.cfg, winner.backend, provenance(winner))}
    for entry in others:
        is_correct = not entry.reason or entry.reason.startswith(Reason.SLOWER)
        if is_correct and entry.backend not in best and (entry.milliseconds or 0.0) >= (winner.milliseconds or 0.0):
            best[entry.backend] = Record(entry.cfg, entry.backend, provenance(entry))
    return tuple(best.values())


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]
