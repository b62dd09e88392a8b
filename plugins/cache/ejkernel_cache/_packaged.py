"""Records that come with a distribution: read, and never written."""

from __future__ import annotations

import importlib.resources
import json
import os
from collections.abc import Iterable, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import attrs

from ejkernel_core import Candidate, Choice, Invocation, Key, Record, RecordError, fitting, hookimpl, recall

from ._documents import LIMIT, canonical, decoded, text_of
from ._names import component


@attrs.frozen
class _Document:
    """One file, and by what it is found."""

    file: str
    text: str
    problem: str
    software: frozenset[tuple[str, str]]
    #: When it was measured; "" for what was put there by hand.
    when: str


@attrs.frozen
class _Shelf:
    """The files of one operation on one device, by the folder of their backend."""

    documents: dict[str, list[_Document]] = attrs.field(factory=dict)
    faults: list[str] = attrs.field(factory=list)


class PackagedRecords:
    """A policy that answers with the records in a package, or in a folder, laid out as a ``PersistentCache`` is.

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

        return recall(inv, candidates, f"packaged records ({self.where})", offered)

    def find(self, key: Key, candidate: Candidate, backends: Sequence[str] = ()) -> Record | None:
        """The record for this kernel, unless one of these backends won the contest that counts."""
        place = component(key.device), component(key.op)
        if place not in self._shelves:
            self._shelves[place] = _shelf(_root(self.where), place)
        shelf = self._shelves[place]
        records, faults = [], list(shelf.faults)
        for document in _ordered(shelf, key, candidate, backends):
            try:
                records.append(decoded(document.text, key, candidate.config_type, {}, any_software=True))
            except RecordError as fault:
                faults.append(f"{document.file}: {fault}")
        record = fitting(records, candidate)
        if record is None and faults:
            raise RecordError("; ".join(faults))
        return record


def _ordered(shelf: _Shelf, key: Key, candidate: Candidate, backends: Sequence[str]) -> list[_Document]:
    """What was put there by hand goes before what was measured, as everywhere."""
    here = json.loads(key.software).items()

    def rank(document: _Document) -> tuple[int, bool, str]:
        return len(document.software & here), not document.when, document.when

    def of(*backends: str | None) -> list[_Document]:
        folders = {component(backend) for backend in backends}
        found = [d for folder in folders for d in shelf.documents.get(folder, ()) if d.problem == key.problem]
        return sorted(found, key=rank, reverse=True)

    ours = of(candidate.backend, None)
    best = next((d for d in of(candidate.backend, None, *backends) if d.when), None)
    if best is not None and best not in ours:
        return [d for d in ours if not d.when]
    return ours


def _root(where: str | os.PathLike[str]) -> Traversable:
    return importlib.resources.files(where) if isinstance(where, str) else Path(where).expanduser()


def _shelf(root: Traversable, place: tuple[str, str]) -> _Shelf:
    shelf = _Shelf()
    for backend in _inside(root.joinpath(*place)):
        for file in _inside(backend):
            if file.name.endswith(".json"):
                name = "/".join((*place, backend.name, file.name))
                try:
                    shelf.documents.setdefault(backend.name, []).append(_document(name, file))
                except RecordError as fault:
                    shelf.faults.append(f"{name}: {fault}")
    return shelf


def _inside(folder: Traversable) -> Iterable[Traversable]:
    return sorted(folder.iterdir(), key=lambda entry: entry.name) if folder.is_dir() else ()


def _document(name: str, file: Traversable) -> _Document:
    text = _text(file)
    try:
        data: Any = json.loads(text)
        when = data["provenance"]["when"] if data["provenance"] else ""
        return _Document(name, text, canonical(data["problem"]), frozenset(data["software"].items()), str(when))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as fault:
        raise RecordError(f"no record: {type(fault).__name__}: {fault}") from fault


def _text(file: Traversable) -> str:
    if not file.is_file():  # opening a FIFO would hold up the call
        raise RecordError("is no regular file")
    try:
        with file.open("rb") as opened:
            return text_of(opened.read(LIMIT + 1))
    except OSError as fault:
        raise RecordError(str(fault)) from fault
