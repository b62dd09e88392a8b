"""The files of the core that a call enters, their lines, and how often the call moves from one to another.

    python benchmarks/path.py

These files are what a reader of a call has to read. They are counted on the CPU with all plugins loaded: for the first
eager call of attention, for the same call again, and for ``jax.jit(jax.grad(...))`` of it. Nothing is timed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax

import ejkernel_core
from ejkernel_bench.suite import Bar, Report, Table
from ejkernel_ops import flash_attention

FIRST, REPEATED, GRADIENT = "first eager call", "repeated eager call", "jit(grad)"
#: The most files, and the most moves between them.
LIMITS = {FIRST: (10, 142), GRADIENT: (12, 308)}
LINES_LIMIT = 400


def trace(call: Callable[[], object], folder: Path) -> tuple[Counter[str], int]:
    """How often a call enters each file of a folder, in the order of the first entries, and its moves between them.

    To enter a function of another file and to return from it are two moves; code outside of the folder does not count.
    A generator is entered by each ``next``, and left by each ``yield``.
    """
    entries, moves, current = Counter[str](), 0, ""
    stack: list[str] = []

    def move_to(file: str) -> None:
        nonlocal moves, current
        moves += current not in ("", file)
        current = file

    def count(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event not in ("call", "return") or not path.startswith(f"{folder}/"):
            return
        if event == "return":
            stack.pop()
            move_to(stack[-1] if stack else current)
            return
        file = path.removeprefix(f"{folder}/")
        entries[file] += 1
        stack.append(file)
        move_to(file)

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entries, moves


def calls() -> dict[str, Callable[[], object]]:
    """The calls of attention, the first of which is the first one of the process."""
    arrays = [jax.numpy.ones((1, 16, 2, 16))] * 3

    def attention(*values: Any) -> Any:
        return flash_attention(*values, causal=True, backend="xla")

    gradients = jax.jit(jax.grad(lambda *values: attention(*values).sum(), (0, 1, 2)))
    eager = lambda: jax.block_until_ready(attention(*arrays))
    return {FIRST: eager, REPEATED: eager, GRADIENT: lambda: jax.block_until_ready(gradients(*arrays))}


def report() -> Report:
    """Of this process, in which nothing has been called before."""
    jax.config.update("jax_platforms", "cpu")
    folder = Path(ejkernel_core.__file__).parent
    _ = ejkernel_core.call  # which is imported when it is first used
    ejkernel_core.registry.inspect()  # it loads the plugins
    paths = {name: trace(call, folder) for name, call in calls().items()}
    files = list(dict.fromkeys(file for entries, _ in paths.values() for file in entries))
    lines = {file: len((folder / file).read_text(encoding="utf-8").splitlines()) for file in files}
    rows: list[tuple[str | int, ...]] = [
        (file, lines[file], *(entries[file] for entries, _ in paths.values())) for file in files
    ]
    sums = [(name, len(entries), moves) for name, (entries, moves) in paths.items()]
    bars = [Bar("lines of the longest file", max(lines.values()), LINES_LIMIT, "lines")]
    for name, (most_files, most_moves) in LIMITS.items():
        entries, moves = paths[name]
        bars.append(Bar(f"{name}, files entered", len(entries), most_files, "files"))
        bars.append(Bar(f"{name}, moves between files", moves, most_moves, "moves"))
    entered = Table("files in the order of their first entries, and the number of entries", ("", "lines", *paths), rows)
    return Report("path", [Table(f"calls in {folder}", ("", "files", "moves"), sums), entered], bars)


if __name__ == "__main__":
    print(report())
