"""Who can write to the folder of a cache, and so choose configurations."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path

from ejkernel_core import UntrustedFolder
from ejkernel_core.extend import printable

STRICT = "EJKERNEL_CACHE_STRICT"
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
#: The folders that this process has warned of.
_told: set[Path] = set()


class CacheWarning(RuntimeWarning):
    """Something is wrong with the files of a cache. The program goes on without them."""


def have_others_access(mode: int) -> bool:
    """Whether the permissions let the group or others write."""
    return os.name == "posix" and bool(mode & OTHERS_MAY_WRITE)


def expect_no_other_writers(path: Path, mode: int, root: Path) -> None:
    """Tell of other writers where the permissions of a path in the folder of a cache allow them."""
    if have_others_access(mode):
        tell_of_other_writers(path, root)


def tell_of_other_writers(path: Path, root: Path) -> None:
    """Warn once that others can write to a path in the folder of a cache; ``UntrustedFolder`` if that is forbidden."""
    text = printable(
        f"{path} can be written to by other users, who choose configurations then; if they should not, run chmod -R "
        f"go-w {root}, or set EJKERNEL_CACHE_DIR to a folder of your own"
    )
    if os.environ.get(STRICT, "") not in ("", "0"):
        raise UntrustedFolder(f"{text} ({STRICT} forbids it)")
    if root not in _told:
        _told.add(root)
        warnings.warn(f"ejkernel-cache: {text}", CacheWarning, stacklevel=2)
