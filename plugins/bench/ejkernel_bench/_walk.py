"""The way of a call through the files of a package."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import attrs


@attrs.frozen
class Walk:
    """Which files of a package a call enters, and how often it moves between two of them.

    A call is always in one file: that of the innermost function of the package that has begun and not ended. It moves
    when this becomes another file, because a function of another one is called, or because it ends and the rest is in
    its caller's. So a call into another file is two moves, there and back. What is of no file of the package (JAX,
    pluggy, the methods that attrs writes) is passed over: what it calls moves from where the package was left. The
    first entry is no move. A generator is entered whenever it goes on, and ends whenever it yields.
    """

    #: How often a function of each file begins, the file that is entered first before all others.
    entries: Mapping[str, int]
    #: Moves, there and back, by (the caller's file, the file of what is called).
    pairs: Mapping[tuple[str, str], int]

    @property
    def moves(self) -> int:
        return sum(self.pairs.values())


def walk(call: Callable[[], object], folder: Path) -> Walk:
    """Make the call and follow it through the files in the folder, in this thread alone."""
    inside = f"{folder}/"
    entries, pairs = Counter[str](), Counter[tuple[str, str]]()
    begun: list[str] = []
    here: str | None = None

    def follow(frame: FrameType, event: str, _: Any) -> None:
        nonlocal here
        path = frame.f_code.co_filename
        if event not in ("call", "return") or not path.startswith(inside):
            return
        file = path.removeprefix(inside)
        if event == "call":
            if here not in (None, file):
                pairs[str(here), file] += 1
            entries[file] += 1
            begun.append(file)
            here = file
            return
        begun.pop()
        if begun and begun[-1] != file:
            pairs[begun[-1], file] += 1
            here = begun[-1]

    before = sys.getprofile()
    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(before)
    return Walk(entries, pairs)
