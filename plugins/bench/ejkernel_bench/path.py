"""What somebody reads who follows a call through the core: the files it enters, and how often it moves between them.

Counted in a process of its own on the CPU, all plugins loaded: attention's first eager call, the same once more, and
then ``jax.jit(jax.grad(...))`` of it, traced and compiled. ``Walk`` says what a move is. Nothing is timed.

To count an earlier commit, put its checkout and its plugins first in PYTHONPATH, and run this outside of any checkout.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

import ejkernel_core
from ejkernel_ops import flash_attention

from ._fresh import in_fresh_process
from ._problem import Problem
from ._report import Bar, Report, Table
from ._walk import Walk, walk

TINY = Problem(1, 16, 2, 16)
BACKEND = "xla"
FIRST, REPEATED, GRADIENT = "first eager call", "repeated eager call", "jit(grad)"
#: How many files may be entered, and how many moves made.
BARS = {FIRST: (10, 142), GRADIENT: (12, 308)}
LINES_BAR = 400
#: How many pairs of files are shown.
MOST = 10

_COUNT = """
import sys
from ejkernel_bench import path
path.write_walks(sys.argv[1])
"""


def run(backend: str = BACKEND) -> Report:
    """By the kernel of plain JAX, unless another one is named."""
    found = in_fresh_process(_COUNT, backend)
    walks = {
        name: Walk(entries, {(caller, callee): moves for caller, callee, moves in pairs})
        for name, (entries, pairs) in found["walks"].items()
    }
    return report(walks, Path(found["folder"]))


def write_walks(backend: str) -> None:
    """Count in this process, which has called nothing yet, and print the counts as JSON."""
    jax.config.update("jax_platforms", "cpu")
    folder = Path(ejkernel_core.__file__).parent
    ejkernel_core.registry.inspect()  # it loads the plugins
    walks = {name: walk(call, folder) for name, call in _calls(backend).items()}
    plain = {name: (one.entries, [(*pair, moves) for pair, moves in one.pairs.items()]) for name, one in walks.items()}
    json.dump({"folder": str(folder), "walks": plain}, sys.stdout)


def _calls(backend: str) -> dict[str, Callable[[], object]]:
    arrays = TINY.arrays()[:3]

    def attention(*values: Any) -> Any:
        return flash_attention(*values, backend=backend, **TINY.options)

    def eager() -> object:
        return jax.block_until_ready(attention(*arrays))

    gradients = jax.jit(jax.grad(lambda *values: attention(*values).sum(), (0, 1, 2)))
    return {FIRST: eager, REPEATED: eager, GRADIENT: lambda: jax.block_until_ready(gradients(*arrays))}


def report(walks: Mapping[str, Walk], folder: Path) -> Report:
    """The sums, the files in the order in which they are entered, and the pairs between which most moves are."""
    files = list(dict.fromkeys(file for one in walks.values() for file in one.entries))
    lines = {file: len((folder / file).read_text(encoding="utf-8").splitlines()) for file in files}
    sums = [
        (name, len(one.entries), max(one.entries, key=lines.__getitem__), max(lines[f] for f in one.entries), one.moves)
        for name, one in walks.items()
    ]
    entered = [(file, lines[file], *(one.entries.get(file, 0) for one in walks.values())) for file in files]
    tables = [
        Table(f"calls in {folder}", ("", "files", "longest", "its lines", "moves"), sums),
        Table("files as they are entered, and how often", ("", "lines", *walks), entered),
        Table(f"moves, the {MOST} pairs of files with the most", ("", *walks), _most_frequent(walks)),
    ]
    bars = [Bar("lines of the longest file", max(lines.values()), LINES_BAR, "lines")]
    for name, (most_files, most_moves) in BARS.items():
        bars.append(Bar(f"{name}, files entered", len(walks[name].entries), most_files, "files"))
        bars.append(Bar(f"{name}, moves between files", walks[name].moves, most_moves, "moves"))
    return Report("path", tables, bars)


def _most_frequent(walks: Mapping[str, Walk]) -> list[tuple[str | int, ...]]:
    """By the most moves that any of the calls makes."""
    pairs = dict.fromkeys(pair for one in walks.values() for pair in one.pairs)
    moves = {pair: [one.pairs.get(pair, 0) for one in walks.values()] for pair in pairs}
    ordered = sorted(moves, key=lambda pair: -max(moves[pair]))
    return [(f"{caller} calls {callee}", *moves[caller, callee]) for caller, callee in ordered[:MOST]]
