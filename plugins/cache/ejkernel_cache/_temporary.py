"""The names of temporary files. They have the process that writes a file, so that no other removes it meanwhile."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import time

#: A file of another host is removed after this time, because it is unknown whether its process is alive.
STALE_S = 3600.0


def new_name() -> str:
    """A name that no other process makes."""
    return f"{_host()}-{os.getpid()}-{secrets.token_hex(8)}"


def is_stale(entry: os.DirEntry[str]) -> bool:
    """Whether the file will not be finished: its process is gone, or that is unknown and the file is old."""
    is_gone = is_process_gone(entry.name)
    if is_gone is not None:
        return is_gone
    # A file may be of the future, too, and would stay for ever.
    return abs(time.time() - entry.stat(follow_symlinks=False).st_mtime) > STALE_S


def is_process_gone(name: str) -> bool | None:
    """Whether the process that made this name is gone; None where that is unknown."""
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
    except PermissionError:  # another user's process, which is alive
        return True
    return True


def _host() -> str:
    """The scope of process numbers, as a hash: the host, and on Linux the container."""
    try:
        container = os.readlink("/proc/self/ns/pid")
    except OSError:
        container = ""
    return hashlib.sha256(f"{platform.node()} {container}".encode()).hexdigest()[:12]
