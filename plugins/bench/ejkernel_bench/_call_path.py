"""The path of a call through the files of a package."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import attrs


@attrs.frozen
class CallPath:
    """Which files of a package a call enters, and how often it moves between two of them.

    A call is in the file of the innermost running function of the package. It moves when this becomes another file:
    when it calls a function of another file, and when that function returns. The first entry is not a move. Code
    outside of the package (JAX, pluggy, the methods that attrs writes) has no file: a function of the package that it
    calls is a move from the package's file that called it. A generator is entered by each ``next``, and left by each
    ``yield``.
    """

    #: How often a function of each file is entered, in the order of the first entries.
    entries: Mapping[str, int]
    #: Moves, in both directions, by (the caller's file, the callee's file).
    pairs: Mapping[tuple[str, str], int]

    @property
    def moves(self) -> int:
        return sum(self.pairs.values())


def trace_files(call: Callable[[], object], folder: Path) -> CallPath:
    """Make the call, and count entries and moves of the files in the folder, in this thread alone."""
    prefix = f"{folder}/"
    entries, pairs = Counter[str](), Counter[tuple[str, str]]()
    stack: list[str] = []
    current: str | None = None

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal current
        path = frame.f_code.co_filename
        if event not in ("call", "return") or not path.startswith(prefix):
            return
        file = path.removeprefix(prefix)
        if event == "call":
            if current not in (None, file):
                pairs[str(current), file] += 1
            entries[file] += 1
            stack.append(file)
            current = file
            return
        stack.pop()
        if stack and stack[-1] != file:
            pairs[stack[-1], file] += 1
            current = stack[-1]

    previous_profiler = sys.getprofile()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(previous_profiler)
    return CallPath(entries, pairs)
