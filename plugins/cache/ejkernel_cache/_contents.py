"""The records of a cache, of a folder or of a file as they are written, whether their kernels are installed or not."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

import attrs

from ejkernel_core import Key, Provenance, RecordError, record_from_json
from ejkernel_core.extend import TAG, canonical_json

from ._directory import Directory, content_of, folders_in, names_in, not_a_file_reason
from ._documents import LINES, MAX_FILE_SIZE, device_and_op, object_of, rebuilt_key, text_of
from ._names import Place, below, decode_component, stem_of


@attrs.frozen
class Document:
    """One record as it is written."""

    #: The file, and the line where it has several.
    place: str
    key: Key
    #: None for a record for any kernel.
    backend: str | None
    #: The fields of the configuration; None for a kernel without configurations.
    config: Mapping[str, Any] | None
    #: None for a record that was put there by hand.
    provenance: Provenance | None
    #: The record in one line of JSON.
    text: str
    #: The bytes that it takes where it was read.
    size: int = 0

    @property
    def when(self) -> str:
        """When it was measured, in UTC; "" for a record that was put there by hand."""
        return self.provenance.when if self.provenance else ""

    @property
    def milliseconds(self) -> float | None:
        """The time of one call; None for a record that was put there by hand."""
        return self.provenance.milliseconds if self.provenance else None

    @property
    def fields(self) -> Mapping[str, Any] | None:
        """The fields of the configuration in the order of its type, as far as the texts of the provenance have it: a
        record has them in the order of their names.
        """
        tried = self.provenance.tried if self.provenance else ()
        text = next((text for text, _ in tried if text.startswith(f"{self.backend} ")), "")
        names = [*dict.fromkeys(re.findall(r"\w+(?==)", text))]
        return self.config and dict(
            sorted(self.config.items(), key=lambda item: names.index(item[0]) if item[0] in names else len(names))
        )

    @property
    def is_for_bucket(self) -> bool:
        """Whether it is for all calls of a bucket, and not for one call alone."""
        problem = json.loads(self.key.problem)
        return isinstance(problem, dict) and "bucket" in problem


@attrs.frozen
class Fault:
    """Why a record could not be read, and which one it is, as far as its place says that."""

    #: With the place.
    text: str
    device: str | None = None
    op: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        return self.text


@attrs.frozen
class Contents:
    """What could be read in a folder or a file, and why the rest could not."""

    documents: tuple[Document, ...]
    faults: tuple[Fault, ...] = ()

    def __or__(self, other: Contents) -> Contents:
        return Contents(self.documents + other.documents, self.faults + other.faults)

    def select(self, op: str | None = None, device: str | None = None, digest: str = "") -> Contents:
        """What is of an operation, "flash*" for several, of devices whose names contain a text, and of keys whose
        digests begin with one. A fault is left out where it is known to be of something else.
        """
        text = (device or "").casefold()

        def is_selected(of: Key | Fault) -> bool:
            return (
                (op is None or of.op is None or fnmatchcase(of.op, op))
                and (of.device is None or text in of.device.casefold())
                and (of.digest is None or of.digest.startswith(digest))
            )

        documents = (document for document in self.documents if is_selected(document.key))
        return Contents(tuple(documents), tuple(filter(is_selected, self.faults)))

    def latest(self) -> dict[str, Document]:
        """The best record of the latest measurement of each problem. One put there by hand counts where there is no
        measured one.
        """
        by_problem: dict[str, Document] = {}
        for document in self.documents:
            other = by_problem.get(document.key.problem)
            if other is None or _rank(document) > _rank(other):
                by_problem[document.key.problem] = document
        return by_problem


def _rank(document: Document) -> tuple[str, float]:
    return document.when, -(document.milliseconds or 0.0)


def contents_of(path: str | os.PathLike[str]) -> Contents:
    """The records in a file of JSON lines, or in a folder: that of a cache, or of a package of records.

    Nothing is moved or changed. A folder that does not exist is empty. ``OSError`` if the folder cannot be listed, or
    the file, which may be a pipe, not be read.
    """
    is_file = Path(path).exists() and not Path(path).is_dir()
    return _collected(_read_file(Path(path)) if is_file else _read_folder(Path(path)))


def contents_of_lines(stream: IO[bytes], name: str) -> Contents:
    """The records in the JSON lines of a stream."""
    return _collected(_read_lines(stream, name))


def _collected(outcomes: Iterable[Document | Fault]) -> Contents:
    documents: list[Document] = []
    faults: list[Fault] = []
    for outcome in outcomes:
        if isinstance(outcome, Document):
            documents.append(outcome)
        else:
            faults.append(outcome)
    documents.sort(key=lambda d: (d.key.device, d.key.op, d.key.problem, d.backend or "", d.when))
    return Contents(tuple(documents), tuple(faults))


def document_of(text: str, place: str, key: Key | None = None, size: int = 0) -> Document:
    """The record in a text. ``RecordError`` if there is none, or one that cannot be shown. The fields of the
    configuration are not checked, because its kernel may not be installed.
    """
    data = object_of(text)
    try:
        line = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
        key = key or _key_of(data)
        record = record_from_json(_without_config(data), key, None)
        document = Document(place, key, record.backend, data["config"], record.provenance, line, size or len(line))
        call_lines(key), margins(record.backend, record.provenance)
    except RecordError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as fault:
        raise RecordError(f"no record: {type(fault).__name__}: {fault}") from fault
    return document


def _key_of(data: Mapping[str, Any]) -> Key:
    device, op = device_and_op(data["problem"])
    if not (isinstance(device, str) and isinstance(op, str)):
        raise RecordError("no record: $.problem has no operation and device", damaged=True)
    return Key(op, device, canonical_json(data["problem"]))


def _without_config(data: Mapping[str, Any]) -> str:
    """The record without its configuration, which takes a kernel to be read."""
    if not isinstance(data["config"], dict | None) or not isinstance(data.get("type"), str | None):
        raise RecordError("$.config is not a configuration", damaged=True)
    return json.dumps({name: value for name, value in data.items() if name != "type"} | {"config": None})


def _read_folder(root: Path) -> Iterator[Document | Fault]:
    try:
        next(os.scandir(root), None)
    except FileNotFoundError:
        return
    yield from _faults_of_folders(root)
    files = Directory(root)
    for place in files.places():
        outcome = _read_place(files, place)
        if outcome is not None:
            yield outcome
    for device in folders_in(root):
        for name in names_in(root / device):
            if name.endswith(LINES):
                yield from _read_lines_of_device(root, root / device / name)


def _read_lines_of_device(root: Path, file: Path) -> Iterator[Document | Fault]:
    known = _fault(root, file, "")
    try:
        stream = io.BytesIO(content_of(file, MAX_FILE_SIZE).data)
    except OSError as fault:
        yield _fault(root, file, fault.strerror or str(fault))
        return
    for outcome in _read_lines(stream, str(file)):
        yield attrs.evolve(known, text=outcome.text) if isinstance(outcome, Fault) else outcome


def _faults_of_folders(root: Path) -> Iterator[Fault]:
    """The folders that cannot be listed, and what is in the place of a file or of a folder."""
    faults: list[OSError] = []
    for name, folders, files in os.walk(root, onerror=faults.append):
        folder = Path(name)
        depth = len(folder.relative_to(root).parts)
        for path in (folder / each for each in sorted([*folders, *files]) if not each.startswith(".")):
            reason = _misplaced_reason(path, depth)
            if reason is not None:
                yield _fault(root, path, reason)
        folders[:] = sorted(each for each in folders if not each.startswith(".") and depth < 3)
    for fault in faults:
        if not isinstance(fault, FileNotFoundError):  # another process has removed it
            yield _fault(root, Path(fault.filename), fault.strerror or str(fault))


def _misplaced_reason(path: Path, depth: int) -> str | None:
    """Why a path is not what belongs at this depth; None where it is, and where anybody may have put it."""
    reason = not_a_file_reason(path)
    is_folder = reason is not None and path.is_dir() and not path.is_symlink()
    if depth == 3:
        return reason if path.suffix == ".json" else None
    if is_folder:
        return reason if depth == 1 and path.suffix == LINES else None
    if reason is not None:
        # The files of a package, beside the folders of its devices, may be links to where they are installed from.
        return None if depth == 0 and path.is_file() else reason
    is_in_package = depth == 0 and (path.parent / "__init__.py").is_file()
    return None if path.suffix or is_in_package else "is not a folder"


def _fault(root: Path, path: Path, reason: str) -> Fault:
    """The fault of a file or a folder of a cache, or of a package."""
    device, op, _, name = (*path.relative_to(root).parts, None, None, None, None)[:4]
    return Fault(
        f"{path}: {reason}",
        None if device is None else decode_component(device),
        None if op is None else decode_component(op.removesuffix(LINES)),
        None if name is None or "-" not in name else stem_of(name).split("-")[1],
    )


def _read_place(files: Directory, place: Place) -> Document | Fault | None:
    """The record in a file of a cache, or why there is none; None for a file that belongs to something else."""
    path = below(files.root, place)
    try:
        content = files.read(place)
        if content is None:  # another process has removed it
            return None
        text = text_of(content.data)
        key = rebuilt_key(text, place)
        if key is None:
            object_of(text)  # what is wrong with a damaged file is said; any other is not one of the cache
            return None
        return document_of(text, str(path), key, len(content.data))
    except OSError as fault:
        return _fault(files.root, path, fault.strerror or str(fault))
    except RecordError as fault:
        return _fault(files.root, path, str(fault))


def _read_file(file: Path) -> Iterator[Document | Fault]:
    with open(file, "rb") as stream:
        yield from _read_lines(stream, str(file))


def _read_lines(stream: IO[bytes], name: str) -> Iterator[Document | Fault]:
    data = stream.read(MAX_FILE_SIZE + 1)
    if len(data) > MAX_FILE_SIZE:
        yield Fault(f"{name}: larger than {MAX_FILE_SIZE} bytes")
        return
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            place = f"{name}, line {number}"
            try:
                yield document_of(text_of(line), place, size=len(line))
            except RecordError as fault:
                yield Fault(f"{place}: {fault}")


# -- merging -----------------------------------------------------------------------------------------------------------


def is_better(new: Provenance | None, old: Provenance | None) -> bool:
    """Whether a record is measured better than one of the same call, backend and versions: all of its configurations
    or within a larger budget, then against more backends, then faster. One put there by hand stays, and replaces none.
    """
    if old is None or new is None:
        return False
    if (budget := _budget(new)) != (old_budget := _budget(old)):
        return budget > old_budget
    if {*new.backends} != {*old.backends} and {*new.backends} >= {*old.backends}:
        return True
    return {*new.backends} >= {*old.backends} and new.milliseconds < old.milliseconds


def _budget(provenance: Provenance) -> float:
    return float("inf") if provenance.shortfall is None else provenance.shortfall.budget_s


# -- text --------------------------------------------------------------------------------------------------------------


def call_lines(key: Key) -> list[str]:
    """The arguments of a problem in lines: arrays of one shape together, then the options that are not off.

    >>> problem = {"arguments": {"x": {"!array": ["float32", "rows", 8]}, "causal": True}, "sizes": {"rows": 3}}
    >>> call_lines(Key("f", "cpu", canonical_json(problem)))
    ['x', '  3x8 float32', 'causal=True']
    """
    problem = json.loads(key.problem)
    if not isinstance(problem, dict):
        return [key.problem]
    arguments, sizes = problem.get("arguments", problem.get("bucket")), problem.get("sizes", {})
    if not isinstance(arguments, dict):
        return [json.dumps(arguments)]
    names: dict[str, list[str]] = {}
    options = []
    for name, value in arguments.items():
        if isinstance(value, dict) and isinstance(array := value.get(f"{TAG}array"), list):
            dtype, *shape = array
            text = "x".join(str(sizes.get(size, size)) for size in shape) or "scalar"
            names.setdefault(f"{text} {dtype}", []).append(name)
        elif value not in (None, False, 0):
            options.append(f"{name}={_option_text(value)}")
    return [line for shape, group in names.items() for line in (", ".join(group), f"  {shape}")] + options


def _option_text(value: Any) -> str:
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)).startswith(TAG):
        (value,) = value.values()
    if isinstance(value, list):
        return f"({', '.join(map(str, value))})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def margins(backend: str | None, provenance: Provenance | None) -> dict[str, float]:
    """By how much a backend's record won: how many times as long the next best configuration took, and the best one of
    each other backend. Below 1, it was slower.

    >>> tried = (("triton a", 1.0), ("xla c", 2.0), ("triton b", 1.5), ("triton c", "did not compile"))
    >>> margins("triton", Provenance(when="", device="", milliseconds=1.0, backends=("xla", "triton"), tried=tried))
    {'next': 1.5, 'xla': 2.0}
    """
    if provenance is None or not provenance.milliseconds:
        return {}
    own = (backend or "", provenance.milliseconds)
    times = [(text.partition(" ")[0], float(time)) for text, time in provenance.tried if not isinstance(time, str)]
    if own in times:
        times.remove(own)
    times.sort(key=lambda pair: pair[1])
    ratios: dict[str, float] = {}
    for name, time in [("next", time) for _, time in times[:1]] + times:
        if name != backend:
            ratios.setdefault(name, time / provenance.milliseconds)
    return ratios
