"""The files of a cache: written whole or not at all, read without a lock, and never outside of their folder.

Nothing below the root that is a symbolic link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import attrs

from . import _temporary
from ._documents import LIMIT
from ._names import Place, below

DAMAGED, TEMPORARY, UNFINISHED = ".damaged", ".tmp", ".tuning"
#: How often a write is begun anew because somebody removes the folders meanwhile.
ATTEMPTS = 20

# Not every system has all of them. A FIFO in the place of a file would hold up a reader without O_NONBLOCK.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_READ = os.O_RDONLY | _NO_LINK | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK | getattr(os, "O_BINARY", 0)


@attrs.frozen
class Content:
    """What a file held, and which file that was."""

    data: bytes
    when: int
    identity: tuple[int, ...]


class Directory:
    """Everything below one root. Whatever the system refuses is an ``OSError`` with the path in it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, place: Place) -> Content | None:
        """The content, no more of it than tells that it is too much; None where there is no file."""
        path = below(self.root, place)
        try:
            for folder in (path.parents[2], path.parents[1], path.parent):
                _expect_folder(folder)
            return _content(path)
        except FileNotFoundError:
            return None

    def write(self, place: Place, data: bytes) -> None:
        """On disk when this returns. Until then, a reader sees what was there before."""
        for attempt in range(ATTEMPTS):
            try:
                self.write_at(place[:-1], place[-1], data)
            except (FileNotFoundError, FileExistsError):
                if attempt == ATTEMPTS - 1:
                    raise
            else:
                return

    def write_at(self, folders: tuple[str, ...], name: str, data: bytes, durably: bool = True) -> None:
        """The same for any file, once; what is not written ``durably`` outlives the process, not the machine."""
        temporary = self.made(TEMPORARY) / _temporary.new_name()
        folder = self.made(*folders)
        descriptor = os.open(temporary, _WRITE, 0o666)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                if durably:
                    os.fsync(descriptor)
            os.replace(temporary, folder / name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if durably:
            _sync(folder)

    def set_aside(self, place: Place, seen: Content) -> Path | None:
        """Move a damaged file away; where it lies then, or None if it is no longer there."""
        _, op, backend, name = place
        aside = self.made(DAMAGED) / f"{op[:60]}.{backend[:60]}.{name[:-5]}.{secrets.token_hex(4)}.json"
        path = below(self.root, place)
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            return None
        if _identity(os.lstat(aside)) == seen.identity:
            return aside
        # A writer has put a good one there since it was read. Back with it, unless there is yet another.
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
        os.unlink(aside)
        return None

    def sweep(self) -> None:
        """Remove what writers have left behind that are gone."""
        folder = self.root / TEMPORARY
        with contextlib.suppress(OSError):
            _expect_folder(folder)
            for entry in list(os.scandir(folder)):
                with contextlib.suppress(OSError):
                    if _temporary.is_stale(entry):
                        os.unlink(entry)

    def places(self) -> Iterator[Place]:
        """Where there are files."""
        for device in _folders(self.root):
            for op in _folders(self.root / device):
                yield from self.places_in(device, op)

    def places_in(self, device: str, op: str) -> Iterator[Place]:
        """Where there are files for one operation on one device."""
        for backend in self.backends(device, op):
            for name in _names(self.root / device / op / backend):
                yield device, op, backend, name

    def backends(self, device: str, op: str) -> list[str]:
        """The folders of the backends."""
        return _folders(self.root / device / op)

    def has(self, place: Place) -> bool:
        """Whether there is a file."""
        try:
            return stat.S_ISREG(os.lstat(below(self.root, place)).st_mode)
        except OSError:
            return False

    def remove(self, place: Place) -> None:
        """Remove a file, and the folders that are empty then."""
        path = below(self.root, place)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with contextlib.suppress(OSError):
            for folder in (path.parent, path.parents[1], path.parents[2]):
                os.rmdir(folder)

    def made(self, *names: str) -> Path:
        """The folder, made where it is missing, durably."""
        os.makedirs(self.root, exist_ok=True)
        folder = self.root
        for name in names:
            parent, folder = folder, folder / name
            try:
                os.mkdir(folder)
            except FileExistsError:
                _expect_folder(folder)
            else:
                _sync(parent)
        return folder


def _content(path: Path) -> Content:
    try:
        descriptor = os.open(path, _READ)
    except OSError as fault:
        if fault.errno == errno.ELOOP:  # "too many levels" would say little
            raise OSError(errno.ELOOP, "is a symbolic link", str(path)) from fault
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return Content(file.read(LIMIT + 1), status.st_mtime_ns, _identity(status))
    finally:
        os.close(descriptor)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """The inode alone may be used again."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _expect_folder(folder: Path) -> None:
    mode = os.lstat(folder).st_mode
    if not stat.S_ISDIR(mode):
        what = "is a symbolic link" if stat.S_ISLNK(mode) else "is no folder"
        raise NotADirectoryError(errno.ENOTDIR, what, str(folder))


def _folders(folder: Path) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith("."))
    return []


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_file(follow_symlinks=False) and e.name.endswith(".json"))
    return []


def _sync(folder: Path) -> None:
    """Have the names in a folder on disk. Some systems and file systems cannot; they keep them well enough."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
