"""Who can write to the folder of a cache, which is examined without the core."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

#: A record is below the folders of its device, its operation and its backend.
DEPTH = 3


def writable_by_others(root: Path) -> Iterator[Path]:
    """The folder of a cache, and the files and folders in it, to which the group or others may write. None on Windows.

    Links are left out, because they have no permissions, and nothing follows them.
    """
    if _may_others_write(root, follow=True):
        yield root
    for name, folders, files in os.walk(root):
        yield from filter(_may_others_write, (Path(name, each) for each in sorted([*folders, *files])))
        if len(Path(name).relative_to(root).parts) == DEPTH:
            folders.clear()


def _may_others_write(path: Path, follow: bool = False) -> bool:
    try:
        mode = os.stat(path, follow_symlinks=follow).st_mode
    except OSError:  # another process has removed it
        return False
    return os.name == "posix" and not stat.S_ISLNK(mode) and bool(mode & (stat.S_IWGRP | stat.S_IWOTH))
