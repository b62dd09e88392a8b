"""Records that come with a distribution: read, and never written."""

from __future__ import annotations

import importlib.resources
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import attrs

from ejkernel_core import Candidate, Choice, Invocation, Key, Record, RecordError, fitting, hookimpl, recall

from ._documents import LIMIT, canonical, decoded, named_in, text_of
from ._names import component

#: The end of the name of a file that has a record in each line.
LINES = ".jsonl"
#: Such a file is no larger than this.
MANY = 64 * LIMIT


@attrs.frozen
class _Document:
    """One record as text, and by what it is found."""

    #: The file, and the line where it has several.
    place: str
    text: str
    key: Key
    #: None for a record that is for any kernel.
    kernel: str | None
    software: Mapping[str, str]
    #: When it was measured; "" for what was put there by hand.
    when: str


@attrs.frozen
class _Shelf:
    """The records of one operation on one device."""

    documents: list[_Document] = attrs.field(factory=list)
    faults: list[str] = attrs.field(factory=list)


class PackagedRecords:
    """A policy that answers with the records in a package, or in a folder: a file ``<device>/<operation>.jsonl`` with
    one in each line, or files as a ``PersistentCache`` has them.

    ``where`` is the name of a package, or a ``Path``. A record holds for its problem whatever the software: who
    publishes records says for what they are good. Of several contests for one problem that counts whose versions are
    most like those that are here, or else the latest. What was measured has to be something that its kernel offers
    here, too. Nothing is read before the first call asks.
    """

    #: After what was measured on this machine, before models.
    RANK = 60

    def __init__(self, where: str | os.PathLike[str]) -> None:
        if isinstance(where, str) and not all(part.isidentifier() for part in where.split(".")):
            raise ValueError(f"takes the name of a package, or a Path for a folder; got {where!r}")
        self.where = where
        self._shelves: dict[tuple[str, str], _Shelf] = {}

    @hookimpl
    def select_config(self, inv: Invocation, candidates: Sequence[Candidate]) -> Choice | None:
        """The fastest record for this call, or for those like it."""
        backends = [candidate.backend for candidate in candidates]

        def offered(key: Key, candidate: Candidate) -> Record | None:
            record = self.find(key, candidate, backends)
            if record is not None and record.provenance is not None and not candidate.kernel.offers(inv, record.cfg):
                raise RecordError(f"{candidate.backend} does not offer {record.cfg} here")
            return record

        origin = f"packaged records ({self.where})"
        return recall(inv, candidates, origin, offered, near=self.near, other_versions=True)

    def find(self, key: Key, candidate: Candidate, backends: Sequence[str] = ()) -> Record | None:
        """The record for this kernel, unless one of these backends won the contest that counts."""
        shelf = self._shelf(key)
        records, faults = [], list(shelf.faults)
        for document in _ordered(shelf, key, candidate, backends):
            try:
                records.append(decoded(document.text, key, candidate.config_type))
            except RecordError as fault:
                faults.append(f"{document.place}: {fault}")
        # In their own order: ``fitting`` would put what was measured with other versions last.
        record = next((one for each in records if (one := fitting([each], candidate))), None)
        if record is None and faults:
            raise RecordError("; ".join(faults))
        return record

    def near(self, key: Key) -> list[Key]:
        """The keys of the same ``kind``: they differ in axes that only count things."""
        return list(dict.fromkeys(d.key for d in self._shelf(key).documents if d.key.kind == key.kind))

    def _shelf(self, key: Key) -> _Shelf:
        place = component(key.device), component(key.op)
        if place not in self._shelves:
            self._shelves[place] = _filled(_root(self.where), *place)
        return self._shelves[place]


def _ordered(shelf: _Shelf, key: Key, candidate: Candidate, backends: Sequence[str]) -> list[_Document]:
    """What was put there by hand goes before what was measured, as everywhere."""
    here = candidate.software

    def rank(document: _Document) -> tuple[int, bool, str]:
        like_ours = sum(here.get(name) == version for name, version in document.software.items())
        return like_ours, not document.when, document.when

    def of(*backends: str | None) -> list[_Document]:
        kernels = {None if backend is None else f"{key.op}.{backend}" for backend in backends}
        found = [d for d in shelf.documents if d.kernel in kernels and d.key.problem == key.problem]
        return sorted(found, key=rank, reverse=True)

    ours = of(candidate.backend, None)
    best = next((d for d in of(candidate.backend, None, *backends) if d.when), None)
    if best is not None and best not in ours:
        return [d for d in ours if not d.when]
    return ours


def _root(where: str | os.PathLike[str]) -> Traversable:
    return importlib.resources.files(where) if isinstance(where, str) else Path(where).expanduser()


def _filled(root: Traversable, device: str, op: str) -> _Shelf:
    shelf = _Shelf()
    for place, file in _files(root.joinpath(device), f"{device}/", op):
        try:
            texts = _texts(place, file)
        except RecordError as fault:
            shelf.faults.append(f"{place}: {fault}")
            continue
        for own_place, text in texts.items():
            try:
                shelf.documents.append(_document(own_place, text))
            except RecordError as fault:
                shelf.faults.append(f"{own_place}: {fault}")
    return shelf


def _files(folder: Traversable, path: str, op: str) -> Iterator[tuple[str, Traversable]]:
    lines = folder.joinpath(f"{op}{LINES}")
    if lines.is_file():
        yield f"{path}{op}{LINES}", lines
    for backend in _inside(folder.joinpath(op)):
        for file in _inside(backend):
            if file.name.endswith(".json"):
                yield f"{path}{op}/{backend.name}/{file.name}", file


def _texts(place: str, file: Traversable) -> dict[str, str]:
    """The records in a file, by their places."""
    if not place.endswith(LINES):
        return {place: _text(file, LIMIT)}
    return {f"{place}, line {number}": line for number, line in enumerate(_text(file, MANY).splitlines(), 1)}


def _inside(folder: Traversable) -> Iterable[Traversable]:
    return sorted(folder.iterdir(), key=lambda entry: entry.name) if folder.is_dir() else ()


def _document(place: str, text: str) -> _Document:
    try:
        data: Any = json.loads(text)
        problem, kernel, provenance = data["problem"], data["kernel"], data["provenance"]
        device, op = named_in(problem)
        key = Key(op, device, canonical(problem))
        if provenance is None:
            return _Document(place, text, key, kernel, {}, "")
        return _Document(place, text, key, kernel, dict(provenance["software"]), str(provenance["when"]))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as fault:
        raise RecordError(f"no record: {type(fault).__name__}: {fault}") from fault


def _text(file: Traversable, limit: int) -> str:
    if not file.is_file():  # opening a FIFO would hold up the call
        raise RecordError("is no regular file")
    try:
        with file.open("rb") as opened:
            return text_of(opened.read(limit + 1), limit)
    except OSError as fault:
        raise RecordError(str(fault)) from fault
