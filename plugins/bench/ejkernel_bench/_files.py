"""The files that a command writes: checked before minutes are spent on what they are to hold."""

from __future__ import annotations

import os
from pathlib import Path


def fault_of(path: Path) -> str | None:
    """Why a file cannot be written there, in a sentence; None where nothing speaks against it."""
    folder = path.parent
    if path.is_dir():
        return f"{path} is a folder; name a file"
    if not folder.is_dir():
        return f"{path} cannot be written: there is no folder {folder}"
    if not os.access(path if path.exists() else folder, os.W_OK):
        return f"{path} cannot be written: permission denied"
    return None


def write(path: Path, text: str) -> None:
    """Write a file whole: if that fails, what was there before stays."""
    if path.exists() and not path.is_file():  # such as a pipe, which cannot be replaced
        path.write_text(text)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
