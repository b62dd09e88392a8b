"""The names of temporary files: they tell whose a file is, so that nobody removes one that is being written."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import time

#: A file of another host, of which nothing else is known, is left alone for so many seconds.
PATIENCE = 3600.0


def new_name() -> str:
    """A name that nobody else makes."""
    return f"{_host()}-{os.getpid()}-{secrets.token_hex(8)}"


def is_stale(entry: os.DirEntry[str]) -> bool:
    """Whether nobody will finish the file: its process is gone, or where that cannot be known, it is old."""
    gone = is_gone(entry.name)
    return time.time() - entry.stat(follow_symlinks=False).st_mtime > PATIENCE if gone is None else gone


def is_gone(name: str) -> bool | None:
    """Whether the process that made this name is; None where that cannot be known."""
    host, _, rest = name.partition("-")
    pid = rest.partition("-")[0]
    if host == _host() and pid.isdecimal() and os.name == "posix":
        return not _is_alive(int(pid))
    return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's, and alive
        return True
    return True


def _host() -> str:
    """Where a process number means something: a host, and on Linux a container of it."""
    try:
        container = os.readlink("/proc/self/ns/pid")
    except OSError:
        container = ""
    return hashlib.sha256(f"{platform.node()} {container}".encode()).hexdigest()[:12]
