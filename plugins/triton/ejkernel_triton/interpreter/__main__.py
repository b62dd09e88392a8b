"""``python -m ejkernel_triton.interpreter``: what the kernels of this package take of a card, in every configuration.

No GPU is needed: Triton and ptxas compile for the card.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ._lock import Lock, key
from ._resources import CARDS, Case, Program, Resources, cases, installed_kernels

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        "python -m ejkernel_triton.interpreter",
        description="compile every configuration of the Triton kernels, and print the resources that each takes",
    )
    names = [point.name for point in installed_kernels()]
    several = {"action": "append", "metavar": "NAME"}
    parser.add_argument("--card", choices=CARDS, help="only this card", **several)  # type: ignore[arg-type]
    parser.add_argument("--kernel", choices=names, help="only this kernel", **several)  # type: ignore[arg-type]
    parser.add_argument("--example", default="", metavar="TEXT", help="only examples with this text in their names")
    parser.add_argument("--lock", type=Path, metavar="FILE", help="compile only what this lock file does not have")
    parser.add_argument("--write", action="store_true", help="write the lock file")
    options = parser.parse_args(arguments)
    if options.write and not options.lock:
        parser.error("--write needs --lock")
    lock = Lock.read(options.lock) if options.lock else Lock()
    checked = cases(options.card or CARDS, options.kernel, options.example)
    is_complete = not (options.card or options.kernel or options.example)
    records = write(lock, checked, options.lock, is_complete) if options.write else lock.record(checked)
    for line in lines(records):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
