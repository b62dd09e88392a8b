"""Records that are installed with a package. They are read, and never written."""

from __future__ import annotations

import importlib.resources
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import attrs

from ejkernel_core import Candidate, Choice, Invocation, Key, Record, RecordError, hookimpl, matching_record, recall
from ejkernel_core.extend import canonical_json, check_time

from ._directory import content_of
from ._documents import LIMIT, LINES, MAX_FILE_SIZE, device_and_op, read_record, text_of
from ._names import component


@attrs.frozen
class _Document:
    """One record as text, and what it is selected by."""

    #: The file, and the line where it has several.
    place: str
    text: str
    key: Key
    #: None for a record for any kernel.
    kernel: str | None
    software: Mapping[str, str]
    #: When it was measured; "" for a record that was put there by hand.
    when: str


@attrs.frozen
class _Records:
    """The records of one operation on one device."""

    documents: list[_Document] = attrs.field(factory=list)
    faults: list[str] = attrs.field(factory=list)


class PackagedRecords:
    """A policy that answers with the records in a package or a folder. They are in files ``<device>/<operation>.jsonl``
    with a record in each line, or in the files of a ``PersistentCache``.

    ``where`` is the name of a package, or a ``Path``. A record counts with all versions of the software, because its
    publisher answers for it. Of several measurements of one problem, the one with the most versions equal to the
    installed ones counts, and of these the latest. Its configuration has to be in the kernel's space for the call.
    Nothing is read before the first call.
    """

    #: Below what was measured on this machine, above models.
    RANK = 60

    def __init__(self, where: str | os.PathLike[str]) -> None:
        if isinstance(where, str) and not all(part.isidentifier() for part in where.split(".")):
            raise ValueError(f"takes the name of a package, or a Path for a folder; got {where!r}")
        self.where = where
        #: Every process has the same package, but maybe not the same folder.
        self.IS_SAME_EVERYWHERE = isinstance(where, str)
        self._records_by_place: dict[tuple[str, str], _Records] = {}

    @hookimpl
    def select_config(self, inv: Invocation, candidates: Sequence[Candidate]) -> Choice | None:
        """The fastest record for this call, for its bucket, or for the nearest call."""
        backends = [candidate.backend for candidate in candidates]

        def find_offered(key: Key, candidate: Candidate) -> Record | None:
            record = self.find(key, candidate, backends)
            if record is not None and record.provenance is not None and not candidate.kernel.offers(inv, record.cfg):
                raise RecordError(f"{candidate.backend} does not offer {record.cfg} here")
            return record

        origin = f"packaged records ({self.where})"
        # Where the fastest kernel of this call is known, and is not a candidate, a heuristic knows more than the record
        # of another call.
        near = None if self._is_won_by_others(inv, backends) else self.near
        return recall(inv, candidates, origin, find_offered, near=near, other_versions=True)

    def find(self, key: Key, candidate: Candidate, backends: Sequence[str] = ()) -> Record | None:
        """The record for the candidate's kernel, unless one of these backends was the fastest in its measurement."""
        stored = self._records_of(key)
        records, faults = [], list(stored.faults)
        for document in _documents_in_order(stored, key, candidate, backends):
            try:
                records.append(read_record(document.text, key, candidate.config_type or type(None)))
            except RecordError as fault:
                faults.append(f"{document.place}: {fault}")
        # One by one, because ``matching_record`` puts records of other versions last.
        record = next((one for each in records if (one := matching_record([each], candidate))), None)
        if record is None and faults:
            raise RecordError("; ".join(faults))
        return record

    def near(self, key: Key) -> list[Key]:
        """The keys of the same ``kind``: they differ only in the sizes of axes that count things."""
        return list(dict.fromkeys(d.key for d in self._records_of(key).documents if d.key.kind == key.kind))

    def _is_won_by_others(self, inv: Invocation, backends: Sequence[str]) -> bool:
        """Whether all measured records of this call and of its bucket are of kernels of other backends."""
        try:
            keys = inv.tuning_keys
        except TypeError:  # an option without content, so there is no key
            return False
        problems, documents = {key.problem for key in keys}, self._records_of(keys[0]).documents
        kernels = {d.kernel for d in documents if d.when and d.key.problem in problems}
        return bool(kernels) and kernels.isdisjoint({None, *(f"{inv.op}.{backend}" for backend in backends)})

    def _records_of(self, key: Key) -> _Records:
        place = component(key.device), component(key.op)
        if place not in self._records_by_place:
            self._records_by_place[place] = _read_folder(_root(self.where), *place)
        return self._records_by_place[place]


def _documents_in_order(stored: _Records, key: Key, candidate: Candidate, backends: Sequence[str]) -> list[_Document]:
    """The documents for a candidate, the best first. Those put there by hand go before measured ones."""
    versions_here = candidate.software

    def rank(document: _Document) -> tuple[int, bool, str]:
        equal_versions = sum(versions_here.get(name) == version for name, version in document.software.items())
        return equal_versions, not document.when, document.when

    def documents_of(*backends: str | None) -> list[_Document]:
        kernels = {None if backend is None else f"{key.op}.{backend}" for backend in backends}
        documents = [d for d in stored.documents if d.kernel in kernels and d.key.problem == key.problem]
        return sorted(documents, key=rank, reverse=True)

    own_documents = documents_of(candidate.backend, None)
    best = next((d for d in documents_of(candidate.backend, None, *backends) if d.when), None)
    if best is not None and best not in own_documents:
        return [d for d in own_documents if not d.when]
    return own_documents


def _root(where: str | os.PathLike[str]) -> Traversable:
    return importlib.resources.files(where) if isinstance(where, str) else Path(where).expanduser()


def _read_folder(root: Traversable, device: str, op: str) -> _Records:
    records = _Records()
    try:
        files = list(_files(root.joinpath(device), f"{device}/", op))
    except OSError as fault:
        records.faults.append(f"{fault.filename or device}: {fault.strerror or fault}")
        return records
    for place, file in files:
        try:
            texts = _texts(place, file)
        except RecordError as fault:
            records.faults.append(f"{place}: {fault}")
            continue
        for place_of_record, text in texts.items():
            try:
                records.documents.append(_document(place_of_record, text))
            except RecordError as fault:
                records.faults.append(f"{place_of_record}: {fault}")
    return records


def _files(folder: Traversable, path: str, op: str) -> Iterator[tuple[str, Traversable]]:
    lines = folder.joinpath(f"{op}{LINES}")
    # What else may be there in its place is told when it is read.
    if lines.is_file() or (isinstance(lines, Path) and os.path.lexists(lines)):
        yield f"{path}{op}{LINES}", lines
    for backend in _children(folder.joinpath(op)):
        for file in _children(backend):
            if file.name.endswith(".json"):
                yield f"{path}{op}/{backend.name}/{file.name}", file


def _texts(place: str, file: Traversable) -> dict[str, str]:
    """The text of each record in a file, by its place."""
    if not place.endswith(LINES):
        return {place: _text(file, LIMIT)}
    return {f"{place}, line {number}": line for number, line in enumerate(_text(file, MAX_FILE_SIZE).splitlines(), 1)}


def _children(folder: Traversable) -> Iterable[Traversable]:
    return sorted(folder.iterdir(), key=lambda entry: entry.name) if folder.is_dir() else ()


def _document(place: str, text: str) -> _Document:
    try:
        data: Any = json.loads(text)
        problem, kernel, provenance = data["problem"], data["kernel"], data["provenance"]
        device, op = device_and_op(problem)
        key = Key(op, device, canonical_json(problem))
        if not isinstance(kernel, str | None):
            raise TypeError(f"its kernel is a {type(kernel).__name__}")
        if provenance is None:
            return _Document(place, text, key, kernel, {}, "")
        when = str(provenance["when"])
        check_time(when)
        return _Document(place, text, key, kernel, dict(provenance["software"]), when)
    except RecordError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as fault:
        raise RecordError(f"no record: {type(fault).__name__}: {fault}") from fault


def _text(file: Traversable, limit: int) -> str:
    try:
        # An installer may put links in the place of a package's files, which Python follows, too.
        data = content_of(file, limit, follow=True).data if isinstance(file, Path) else _read(file, limit)
    except OSError as fault:
        raise RecordError(fault.strerror or str(fault)) from fault
    return text_of(data, limit)


def _read(file: Traversable, limit: int) -> bytes:
    with file.open("rb") as stream:
        return stream.read(limit + 1)
