"""The files of a cache. They are replaced as a whole, read without a lock, and never outside of the cache's folder.

Below the root, no symbolic link is followed, and nothing is opened that is not a regular file: a FIFO or a device would
never end.
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
from ._trust import OTHERS_MAY_WRITE, expect_no_other_writers, have_others_access

DAMAGED, TEMPORARY, UNFINISHED = ".damaged", ".tmp", ".tuning"
#: How often a write is tried again because another process removes the folders meanwhile.
ATTEMPTS = 20
#: The bytes of a usual record.
PROBE_SIZE = 16384

# Not every system has all of these flags. Without O_NONBLOCK, opening a FIFO in the place of a file would hang.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_READ = os.O_RDONLY | _NO_LINK | _NO_WAIT | getattr(os, "O_BINARY", 0)
_LOCK = os.O_RDWR | os.O_CREAT | _NO_LINK | _NO_WAIT
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK | getattr(os, "O_BINARY", 0)


@attrs.frozen
class Content:
    """The content of a file, its time, and the identity of the file."""

    data: bytes
    when: int
    identity: tuple[int, ...]
    mode: int


class Directory:
    """The files below one root. What the system refuses is an ``OSError`` that has the path.

    With ``expects_trust``, what others can write to is told when it is used: see ``expect_no_other_writers``.
    """

    def __init__(self, root: Path, expects_trust: bool = False) -> None:
        self.root = root
        self.expects_trust = expects_trust

    def expect_trusted(self) -> None:
        """Tell if others can write to the root, which may be missing."""
        with contextlib.suppress(OSError):
            self._expect_trust(self.root, os.stat(self.root).st_mode)

    def _expect_trust(self, path: Path, mode: int) -> None:
        if self.expects_trust:
            expect_no_other_writers(path, mode, self.root)

    def _permissions(self, permissions: int) -> int:
        """The permissions of what is made. Others can write to it only if they can write to the root."""
        is_shared = have_others_access(os.stat(self.root).st_mode)
        return permissions if is_shared else permissions & ~OTHERS_MAY_WRITE

    def path(self, parts: tuple[str, ...]) -> Path:
        """The path of a file, whose folders are not links. ``OSError`` where one is, or is missing."""
        folder = self.root
        for name in parts[:-1]:
            folder /= name
            self._expect_trust(folder, _expect_folder(folder))
        return folder / parts[-1]

    def read(self, parts: tuple[str, ...]) -> Content | None:
        """The content of a file, up to one byte more than ``LIMIT``; None where there is no file."""
        try:
            path = self.path(parts)
            content = content_of(path)
        except FileNotFoundError:
            return None
        self._expect_trust(path, content.mode)
        return content

    def write(self, place: Place, data: bytes) -> None:
        """Write a file. It is on disk when this returns; until then, readers see the old one."""
        for attempt in range(ATTEMPTS):
            try:
                self.write_at(place[:-1], place[-1], data)
            except (FileNotFoundError, FileExistsError):
                if attempt == ATTEMPTS - 1:
                    raise
            else:
                return

    def write_at(self, folders: tuple[str, ...], name: str, data: bytes, durably: bool = True) -> None:
        """Write any file, with one try. Without ``durably``, it survives the process, and maybe not the machine."""
        temporary = self.make_folder(TEMPORARY) / _temporary.new_name()
        folder = self.make_folder(*folders)
        descriptor = os.open(temporary, _WRITE, self._permissions(0o666))
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

    def try_to_write(self) -> None:
        """Write a file of the size of a record, and remove it. ``OSError`` says why this cannot be done."""
        path = self.make_folder(TEMPORARY) / _temporary.new_name()
        descriptor = os.open(path, _WRITE, self._permissions(0o666))
        try:
            with open(descriptor, "wb") as file:
                file.write(b" " * PROBE_SIZE)
                file.flush()
                os.fsync(descriptor)
        finally:
            os.unlink(path)

    def set_aside(self, place: Place, content: Content) -> Path | None:
        """Move a damaged file away. Return its new path, or None if another process has moved or replaced it."""
        _, op, backend, name = place
        new_path = self.make_folder(DAMAGED) / f"{op[:60]}.{backend[:60]}.{name[:-5]}.{secrets.token_hex(4)}.json"
        path = below(self.root, place)
        try:
            os.rename(path, new_path)
        except FileNotFoundError:
            return None
        if _identity(os.lstat(new_path)) == content.identity:
            return new_path
        # A writer has replaced the file since it was read. Put this one back, unless there is yet another.
        with contextlib.suppress(FileExistsError):
            os.link(new_path, path)
        os.unlink(new_path)
        return None

    def sweep(self) -> None:
        """Remove the temporary files of processes that have ended."""
        folder = self.root / TEMPORARY
        with contextlib.suppress(OSError):
            _expect_folder(folder)
            for entry in list(os.scandir(folder)):
                with contextlib.suppress(OSError):
                    if _temporary.is_stale(entry):
                        os.unlink(entry)

    def places(self) -> Iterator[Place]:
        """The places of all files."""
        for device in folders_in(self.root):
            for op in folders_in(self.root / device):
                yield from self.places_in(device, op)

    def places_in(self, device: str, op: str) -> Iterator[Place]:
        """The places of the files for one operation on one device."""
        for backend in self.backends(device, op):
            for name in names_in(self.root / device / op / backend):
                if name.endswith(".json"):
                    yield device, op, backend, name

    def backends(self, device: str, op: str) -> list[str]:
        """The names of the backends' folders."""
        return folders_in(self.root / device / op)

    def has(self, parts: tuple[str, ...]) -> bool:
        """Whether there is a file."""
        try:
            return stat.S_ISREG(os.lstat(self.path(parts)).st_mode)
        except OSError:
            return False

    def names(self, folder: str) -> list[str]:
        """The names of the files in a folder below the root; none where that is missing or something else."""
        with contextlib.suppress(OSError):
            _expect_folder(self.root / folder)
            return names_in(self.root / folder)
        return []

    def unlink(self, parts: tuple[str, ...]) -> None:
        """Remove a file, or the link in its place."""
        os.unlink(self.path(parts))

    def remove(self, place: Place) -> None:
        """Remove a file, and then the folders that are empty."""
        with contextlib.suppress(FileNotFoundError):
            self.unlink(place)
        path = below(self.root, place)
        with contextlib.suppress(OSError):
            for folder in (path.parent, path.parents[1], path.parents[2]):
                os.rmdir(folder)

    def make_folder(self, *names: str) -> Path:
        """Make a folder durably where it is missing, and return its path."""
        try:
            os.makedirs(self.root, 0o755, exist_ok=True)
        except FileExistsError as fault:
            if not self.root.is_file():  # another process has removed the folder meanwhile
                raise
            raise NotADirectoryError(errno.ENOTDIR, "is a file, not a folder", str(self.root)) from fault
        folder = self.root
        for name in names:
            parent, folder = folder, folder / name
            try:
                os.mkdir(folder, self._permissions(0o777))
            except FileExistsError:
                _expect_folder(folder)
            else:
                _sync(parent)
        return folder


def content_of(path: Path, limit: int = LIMIT, follow: bool = False) -> Content:
    """The content of a regular file, up to one byte more than ``limit``. ``OSError`` for anything else, and for a link,
    unless it is to be followed.
    """
    try:
        descriptor = os.open(path, _READ & ~_NO_LINK if follow else _READ)
    except OSError as fault:  # the system's text, such as "too many levels" of a link, or of a socket, is not clear
        reason = not_a_file_reason(path)
        if reason is None:
            raise
        raise OSError(fault.errno, reason, str(path)) from fault
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return Content(file.read(limit + 1), status.st_mtime_ns, _identity(status), status.st_mode)
    finally:
        os.close(descriptor)


def open_lock(path: Path) -> int:
    """The descriptor of a file that may be locked and written to. It is made where it is missing."""
    is_shared = have_others_access(os.lstat(path.parent).st_mode)
    descriptor = os.open(path, _LOCK, 0o666 if is_shared else 0o644)
    status = os.fstat(descriptor)
    # The owner writes its name into the file. A file with another name may be somebody's outside of the cache.
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is not a file of its own", str(path))


def not_a_file_reason(path: Path) -> str | None:
    """What stands in the place of a file; None for a file, and if another process has removed it."""
    try:
        mode = os.lstat(path).st_mode  # once: it may be removed at any time
    except FileNotFoundError:
        return None
    if stat.S_ISREG(mode):
        return None
    return "is a symbolic link" if stat.S_ISLNK(mode) else "is not a regular file"


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """What identifies a file. The inode alone does not, because it may be used again."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _expect_folder(folder: Path) -> int:
    """The mode of a folder. ``OSError`` for anything else, such as a link to one."""
    mode = os.lstat(folder).st_mode
    if not stat.S_ISDIR(mode):
        reason = "is a symbolic link" if stat.S_ISLNK(mode) else "is not a folder"
        raise NotADirectoryError(errno.ENOTDIR, reason, str(folder))
    return mode


def folders_in(folder: Path) -> list[str]:
    """The names of the folders in a folder, but for hidden ones."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith("."))
    return []


def names_in(folder: Path) -> list[str]:
    """The names of the files in a folder."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_file(follow_symlinks=False))
    return []


def _sync(folder: Path) -> None:
    """Write the names in a folder to disk, where the system can do so."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
