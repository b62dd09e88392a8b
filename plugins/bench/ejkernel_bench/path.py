"""The files of the core that a call enters, their lengths, and how often the call moves between them.

These files are what a reader of a call has to read. They are counted in a new process on the CPU with all plugins
loaded: for the first eager call of attention, for the same call again, and for ``jax.jit(jax.grad(...))`` of it, traced
and compiled. ``CallPath`` defines a move. Nothing is timed.

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
from ejkernel_ops.flash_attention.sizes import self_attention

from ._call_path import CallPath, trace_files
from ._calls import options_of
from ._fresh import in_new_process
from ._report import Bar, Cell, Report, Table

TINY = self_attention(1, 16, 2, 16)
BACKEND = "xla"
FIRST, REPEATED, GRADIENT = "first eager call", "repeated eager call", "jit(grad)"
#: The most files, and the most moves between them.
LIMITS = {FIRST: (10, 142), GRADIENT: (12, 308)}
LINES_LIMIT = 400
#: The number of pairs of files in the table.
PAIRS_SHOWN = 10

_COUNT = """
import sys
from ejkernel_bench import path
path.write_paths(sys.argv[1])
"""


def run(backend: str = BACKEND) -> Report:
    """With the kernel in plain JAX, or another one."""
    counts = in_new_process(_COUNT, backend)
    paths = {
        name: CallPath(entries, {(caller, callee): moves for caller, callee, moves in pairs})
        for name, (entries, pairs) in counts["paths"].items()
    }
    return report(paths, Path(counts["folder"]))


def write_paths(backend: str) -> None:
    """Count in this process, before any other call, and print the counts as JSON."""
    jax.config.update("jax_platforms", "cpu")
    folder = Path(ejkernel_core.__file__).parent
    _ = ejkernel_core.call  # which is imported when it is first used
    ejkernel_core.registry.inspect()  # it loads the plugins
    paths = {name: trace_files(call, folder) for name, call in _calls(backend).items()}
    data = {name: (path.entries, [(*pair, n) for pair, n in path.pairs.items()]) for name, path in paths.items()}
    json.dump({"folder": str(folder), "paths": data}, sys.stdout)


def _calls(backend: str) -> dict[str, Callable[[], object]]:
    arguments, options = TINY.arguments(0), options_of(TINY)
    arrays = [arguments[name] for name in ("query", "key", "value")]

    def attention(*values: Any) -> Any:
        return flash_attention(*values, backend=backend, **options)

    def eager() -> object:
        return jax.block_until_ready(attention(*arrays))

    gradients = jax.jit(jax.grad(lambda *values: attention(*values).sum(), (0, 1, 2)))
    return {FIRST: eager, REPEATED: eager, GRADIENT: lambda: jax.block_until_ready(gradients(*arrays))}


def report(paths: Mapping[str, CallPath], folder: Path) -> Report:
    """The sums, the files in the order of their first entries, and the pairs of files with the most moves."""
    files = list(dict.fromkeys(file for path in paths.values() for file in path.entries))
    lines = {file: len((folder / file).read_text(encoding="utf-8").splitlines()) for file in files}
    sums: list[tuple[Cell, ...]] = [
        (name, len(path.entries), longest := max(path.entries, key=lines.__getitem__), lines[longest], path.moves)
        for name, path in paths.items()
    ]
    entries: list[tuple[Cell, ...]] = [
        (file, lines[file], *(path.entries.get(file, 0) for path in paths.values())) for file in files
    ]
    tables = [
        Table(f"calls in {folder}", ("", "files", "longest", "its lines", "moves"), sums),
        Table("files in the order of their first entries, and the number of entries", ("", "lines", *paths), entries),
        Table(f"moves, the {PAIRS_SHOWN} pairs of files with the most", ("", *paths), _most_frequent(paths)),
    ]
    bars = [Bar("lines of the longest file", max(lines.values()), LINES_LIMIT, "lines")]
    for name, (most_files, most_moves) in LIMITS.items():
        bars.append(Bar(f"{name}, files entered", len(paths[name].entries), most_files, "files"))
        bars.append(Bar(f"{name}, moves between files", paths[name].moves, most_moves, "moves"))
    return Report("path", tables, bars)


def _most_frequent(paths: Mapping[str, CallPath]) -> list[tuple[Cell, ...]]:
    """In the order of the most moves in any of the calls."""
    pairs = dict.fromkeys(pair for path in paths.values() for pair in path.pairs)
    moves = {pair: [path.pairs.get(pair, 0) for path in paths.values()] for pair in pairs}
    ordered = sorted(moves, key=lambda pair: -max(moves[pair]))
    return [(f"{caller} calls {callee}", *moves[caller, callee]) for caller, callee in ordered[:PAIRS_SHOWN]]
