"""Compile the Triton kernels for a card that is not here.

No GPU is needed: Triton and ptxas compile for the card.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ejkernel_cli import Failure, print_line


@click.group("triton")
def command() -> None:
    """Compile the Triton kernels for a card that is not here."""


@command.command("resources")
@click.option("--card", "cards", multiple=True, metavar="NAME", help="Only this card.")
@click.option("--kernel", "kernels", multiple=True, metavar="NAME", help="Only this kernel, as flash_attention.triton.")
@click.option("--example", default="", metavar="TEXT", help="Only examples with this text in their names.")
@click.option(
    "--lock",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Compile only what this lock file does not have.",
)
@click.option("--write", "is_written", is_flag=True, help="Write the lock file.")
def resources(cards: Sequence[str], kernels: Sequence[str], example: str, file: Path | None, is_written: bool) -> None:
    """What each kernel takes of a card, in every configuration.

    That is shared memory, registers and spilled bytes, as a table in Markdown. A row is printed when it is compiled.
    """
    if is_written and file is None:
        raise click.UsageError("--write needs --lock")
    from .interpreter import _table
    from .interpreter._lock import Lock
    from .interpreter._resources import CARDS, cases, installed_kernels

    _check("card", cards, CARDS)
    _check("kernel", kernels, [point.name for point in installed_kernels()])
    try:
        lock = Lock.read(file) if file else Lock()
    except (OSError, ValueError, KeyError) as error:
        raise Failure(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    checked = cases(cards or CARDS, kernels or None, example)
    is_complete = not (cards or kernels or example)
    records = _table.write(lock, checked, file, is_complete) if is_written and file else lock.record(checked)
    for line in _table.lines(records):
        print_line(line)


def _check(option: str, names: Sequence[str], existing: Sequence[str]) -> None:
    for name in names:
        if name not in existing:
            raise click.UsageError(f"--{option}: there is no {name!r}; there are {', '.join(existing)}")
