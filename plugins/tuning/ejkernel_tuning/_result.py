"""What a contest found out: a table, JSON, an overlay."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import jax

from ejkernel_core._devices import device_name, processor
from ejkernel_core._display import one_line, quantity
from ejkernel_core._errors import RecordError
from ejkernel_core._keys import Key
from ejkernel_core._measurement import Entry
from ejkernel_core._records import SCHEMA, Provenance, Record, record_from_json, record_to_json
from ejkernel_core._scopes import leave, overlay_cache


@attrs.frozen
class Tuned:
    """The contest of one invocation."""

    #: The exact key, and that of the calls that are alike.
    keys: tuple[Key, ...]
    description: str
    #: The winner first, then by time, then those without one.
    entries: tuple[Entry, ...]
    #: The best of every backend, the winner first; none if nobody was measured.
    records: tuple[Record, ...]
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Entry | None:
        """The winner."""
        return self.entries[0] if self.records else None

    def __repr__(self) -> str:
        best = self.best
        won = "nobody was measured" if best is None else f"{best.backend} with {best.cfg}{_time(best)}"
        return f"Tuned({one_line(f'{self.keys[0].op}: {won}')})"

    def __str__(self) -> str:
        rows = [
            (
                "*" if self.records and number == 0 else "",
                entry.backend,
                str(entry.cfg) + (" (heuristic)" if entry.is_usual else ""),
                "" if entry.milliseconds is None else f"{entry.milliseconds:.4g}",
                "" if entry.spread is None else f"{entry.spread:.2g}",
                entry.reason,
            )
            for number, entry in enumerate(self.entries)
        ]
        table = _table(("", "backend", "configuration", "ms", "spread", "out because"), rows)
        return "\n".join(
            [f"{self.description}, in {self.seconds:.1f} s", *table, *(f"  {note}" for note in self.notes)]
        )


@attrs.frozen
class TuningResult:
    """What was tuned. ``with result:`` uses it; ``result | other`` has both, the other's where both have one."""

    tuned: tuple[Tuned, ...] = ()

    @property
    def best(self) -> Entry:
        """The winner of the one contest; ``LookupError`` where there were several, or nobody was measured."""
        if len(self.tuned) != 1:
            raise LookupError(f"there were {len(self.tuned)} contests: see result.tuned")
        best = self.tuned[0].best
        if best is None:
            raise LookupError(f"nobody was measured:\n{self}")
        return best

    @property
    def cfg(self) -> Any:
        """The winner's configuration."""
        return self.best.cfg

    def items(self) -> list[tuple[Key, tuple[Record, ...]]]:
        """The records by key, as a store has them."""
        return [(key, one.records) for one in self.tuned if one.records for key in one.keys]

    def __or__(self, other: TuningResult) -> TuningResult:
        theirs = {one.keys[0] for one in other.tuned}
        return TuningResult((*(one for one in self.tuned if one.keys[0] not in theirs), *other.tuned))

    def __repr__(self) -> str:
        won = ", ".join(_winner(one) for one in self.tuned)
        return f"TuningResult({one_line(': '.join(filter(None, (quantity(len(self.tuned), 'contest'), won))))})"

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tuned)) or "nothing was tuned"

    # -- as an overlay -------------------------------------------------------------------------------------------

    def __enter__(self) -> TuningResult:
        self._check_device()
        overlay_cache(self).__enter__()
        return self

    def __exit__(self, *fault: Any) -> None:
        leave()

    def _check_device(self) -> None:
        here = {*map(device_name, jax.local_devices()), processor()}
        there = {key.device for key, _ in self.items()}
        if there and not there & here:
            raise ValueError(
                f"this was measured on {', '.join(sorted(there))}, and here there are {', '.join(sorted(here))}: "
                "what is best on one is not on the other"
            )

    # -- as text -------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Everything that is needed to use the result elsewhere: the records with their provenance."""
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
        """What ``to_json`` wrote. ``config_type(op, backend)`` gives the type of a kernel's configurations; by default
        the installed kernel's. ``RecordError`` tells what does not fit.
        """
        kinds = config_type or (lambda op, backend: None)
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise RecordError(f"$.schema is {data['schema']!r}; this version reads {SCHEMA}")
            return cls(tuple(_read(document, kinds) for document in data["tuned"]))
        except RecordError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as fault:
            raise RecordError(f"no tuning result: {type(fault).__name__}: {fault}", damaged=True) from fault


def _winner(one: Tuned) -> str:
    best = one.best
    won = "nobody" if best is None else f"{best.backend}{_time(best)}"
    return f"{one.keys[0].op} by {won}"


def _time(entry: Entry) -> str:
    return "" if entry.milliseconds is None else f" in {entry.milliseconds:.3g} ms"


def _key(key: Key) -> dict[str, Any]:
    return attrs.asdict(key)


def _read(document: Any, kinds: Callable[[str, str], type | None]) -> Tuned:
    keys = tuple(Key(**key) for key in document["keys"])
    texts = [(json.dumps(record), str(record["kernel"])) for record in document["records"]]
    records = tuple(record_from_json(text, keys[0], _type_of(kernel, kinds)) for text, kernel in texts)
    entries = tuple(
        Entry(record.backend or "", record.cfg, record.provenance.milliseconds if record.provenance else None)
        for record in records
    )
    return Tuned(keys, f"{keys[0]} on {keys[0].device}, read from JSON", entries, records)


def _type_of(kernel: str, kinds: Callable[[str, str], type | None]) -> type | None:
    import ejkernel_core

    op, _, backend = kernel.rpartition(".")
    return kinds(op, backend) or ejkernel_core.config_type(kernel)


def records_of(entries: Iterable[Entry], provenance: Callable[[Entry], Provenance]) -> tuple[Record, ...]:
    """The winner, which is the first of the entries, and the best of every other backend that is slower."""
    winner, *others = entries
    best = {winner.backend: Record(winner.cfg, winner.backend, provenance(winner))}
    for entry in others:
        is_sound = not entry.reason or entry.reason.startswith("slower")
        if is_sound and entry.backend not in best and (entry.milliseconds or 0.0) >= (winner.milliseconds or 0.0):
            best[entry.backend] = Record(entry.cfg, entry.backend, provenance(entry))
    return tuple(best.values())


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]
