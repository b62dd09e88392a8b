"""Records as files that others can use: one file of lines, or a package that can be installed."""

from __future__ import annotations

import contextlib
import errno
import keyword
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from ejkernel_core.extend import one_line

from . import _temporary
from ._contents import Contents, Document
from ._documents import LINES
from ._names import component
from ._store import PersistentCache

#: What PEP 440 allows: pip installs nothing with another version.
_VERSION = re.compile(
    r"""v?(\d+!)?\d+(\.\d+)*                                       # epoch and release
    ([-_.]?(alpha|a|beta|b|preview|pre|c|rc)[-_.]?\d*)?
    (-\d+|[-_.]?(post|rev|r)[-_.]?\d*)?
    ([-_.]?dev[-_.]?\d*)?
    (\+[a-z0-9]+([-_.][a-z0-9]+)*)?                              # local""",
    re.ASCII | re.IGNORECASE | re.VERBOSE,
)


@attrs.define
class Merged:
    """How many records of each outcome there were."""

    added: int = 0
    #: They were better than those in the cache.
    replaced: int = 0
    #: Those in the cache are better.
    kept: int = 0
    same: int = 0


def merge(cache: PersistentCache, documents: Iterable[Document]) -> Merged:
    """Put records into a cache. Of two records of one call, backend and software, the one that was measured better
    counts. ``OSError`` if the cache cannot be written to; what was merged until then stays.
    """
    merged = Merged()
    for document in documents:
        outcome = cache.merge(document)
        setattr(merged, outcome, getattr(merged, outcome) + 1)
    return merged


def write_lines(file: Path, documents: Iterable[Document]) -> None:
    """Write a record in each line of a file. The old file stays until the new one is whole; a pipe or a device is
    written to as it is.
    """
    text = "".join(f"{line}\n" for line in sorted(document.text for document in documents))
    if file.exists() and not file.is_file():
        try:
            with open(file, "w", encoding="utf-8") as stream:
                stream.write(text)
        except OSError as fault:
            raise _of_file(fault, file) from fault
        return
    file = file.resolve()  # where it is a link, its target is replaced
    temporary = file.with_name(f".{file.name}.{_temporary.new_name()}")
    try:
        with open(temporary, "x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except BaseException as fault:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(fault, OSError):  # whose path is the temporary one
            raise _of_file(fault, file) from fault
        raise


def _of_file(fault: OSError, file: Path) -> OSError:
    """The same fault with the path of a file."""
    return OSError(fault.errno or errno.EIO, fault.strerror or str(fault), str(file))


# -- a package ---------------------------------------------------------------------------------------------------------


def pack(folder: Path, name: str, version: str, contents: Contents) -> list[Path]:
    """Write a distribution that answers with the best record of each problem, and return its files. The folder has to
    be new or empty. ``ValueError`` says what is wrong with a name or a version.
    """
    package = package_name(name)
    if not _VERSION.fullmatch(version):
        raise ValueError(f"version: takes numbers with dots, as 1.0 or 2.1.post3; got {version!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(errno.EEXIST, "exists, and is not an empty folder", str(folder))
    documents = list(contents.latest().values())
    texts = {
        "pyproject.toml": _pyproject(name, version, package),
        "README.md": _readme(name, sorted({document.key.device for document in documents})),
        f"{package}/__init__.py": _init(package),
    }
    lines: dict[str, list[str]] = {}
    for document in documents:
        place = f"{package}/{component(document.key.device)}/{component(document.key.op)}{LINES}"
        lines.setdefault(place, []).append(f"{document.text}\n")
    texts |= {place: "".join(sorted(lines[place])) for place in sorted(lines)}
    return _write_all({folder / place: text.encode() for place, text in texts.items()})


def _write_all(data_of_files: Mapping[Path, bytes]) -> list[Path]:
    """Write new files and the folders that they need, and return the files. If one cannot be written, none is left."""
    made: list[Path] = []
    try:
        for file, data in data_of_files.items():
            try:
                _write_new(file, data, made)
            except OSError as fault:
                raise fault if fault.filename else _of_file(fault, file) from fault
    except BaseException:
        for path in reversed(made):
            with contextlib.suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        raise
    return list(data_of_files)


def _write_new(file: Path, data: bytes, made: list[Path]) -> None:
    """Write a file, and add it and the folders that are made for it to ``made``."""
    for folder in reversed([folder for folder in file.parents if not folder.exists()]):
        folder.mkdir()
        made.append(folder)
    with open(file, "xb") as stream:
        made.append(file)
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def package_name(name: str) -> str:
    """The name of the package in a distribution: "my_records" of "my-records".

    >>> package_name("My-Records")
    'my_records'
    """
    package = re.sub(r"[-_.]+", "_", name).lower()
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*(?<![._-])", name) or keyword.iskeyword(package):
        raise ValueError(f"name: takes letters, digits and '-', and begins with a letter; got {name!r}")
    if package in sys.stdlib_module_names:
        raise ValueError(f"name: {package} is a module of Python; take another name")
    return package


def _pyproject(name: str, version: str, package: str) -> str:
    return textwrap.dedent(
        f"""\
        [build-system]
        requires = ["setuptools>=77"]
        build-backend = "setuptools.build_meta"

        [project]
        name = "{name}"
        version = "{version}"
        description = "Measured configurations of kernels, for ejkernel-core"
        readme = "README.md"
        requires-python = ">=3.11"
        dependencies = ["ejkernel-cache"]

        [project.entry-points."ejkernel.policies"]
        {package} = "{package}:records"

        [tool.setuptools]
        packages = ["{package}"]

        [tool.setuptools.package-data]
        {package} = ["**/*{LINES}"]
        """
    )


def _readme(name: str, devices: list[str]) -> str:
    names = " and ".join(map(one_line, devices))
    return f"# {name}\n\nMeasured configurations of kernels, for ejkernel-core, on {names}.\n"


def _init(package: str) -> str:
    # Without any text of the records, which would be code here.
    return textwrap.dedent(
        f'''\
        """Measured configurations of kernels."""

        from ejkernel_cache import PackagedRecords

        __all__ = ["records"]

        records = PackagedRecords("{package}")
        '''
    )
