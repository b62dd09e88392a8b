"""A table of what kernels take of a card, and the lock file that has its rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ._lock import Lock, key
from ._resources import Case, Program, Resources

#: How many rows are measured before the lock file is written again.
INTERVAL = 20
HEADER = (
    *("card", "kernel", "example", "configuration", "function"),
    *("shared KiB", "at most", "registers", "spilled bytes"),
)


def lines(records: Iterable[tuple[Case, Program, Resources]]) -> Iterator[str]:
    """A table in Markdown, line by line."""
    yield _line(HEADER)
    yield _line(["---"] * len(HEADER))
    for case, program, resources in records:
        estimate = case.estimates().get(program.name)
        sizes = _kib(resources.shared_memory), "" if estimate is None else _kib(estimate)
        cells = (case.card, case.kernel, case.example, case.configuration, program.name, *sizes)
        yield _line((*cells, resources.registers, resources.spilled))


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _kib(size: int) -> str:
    return f"{size / 1024:.1f}"


def write(
    lock: Lock, checked: Iterable[Case], path: Path, is_complete: bool
) -> Iterator[tuple[Case, Program, Resources]]:
    """The resources of these cases, which a lock file gets. With ``is_complete`` the file keeps no other rows."""
    keys = set()
    for case, program, resources in lock.record(checked):
        yield case, program, resources
        keys.add(key(case, program))
        if len(keys) % INTERVAL == 0:
            lock.write(path)
    if is_complete:
        lock.remove(lock.rows.keys() - keys)
    lock.write(path)
