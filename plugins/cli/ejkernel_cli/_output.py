"""Tables, lines and JSON, in a terminal or a pipe."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])
#: The width of tables in a pipe, where there is no terminal to ask, unless COLUMNS has one.
PIPE_WIDTH = 80
#: The longest word that no column breaks where there is space.
MAX_WORD = 26
#: The spaces between two columns.
GAP = 3


class Failure(click.ClickException):
    """An error that is shown in one line, which says what to do. The exit code is 1."""


def json_option(function: Function) -> Function:
    """The option ``--json``, as the parameter ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def printable(text: str) -> str:
    r"""The text with an escape, as in JSON, for each character that may control the terminal or that it cannot show.
    Line breaks and tabs stay. The core has the same function, and cannot be imported everywhere.

    >>> print(printable("red: " + chr(27) + "[31m"))
    red: \u001b[31m
    """
    return "".join(c if c.isprintable() or c in "\n\t" else _escape(c) for c in text)


def _escape(character: str) -> str:
    return "\\u007f" if character == "\x7f" else json.dumps(character)[1:-1]


def print_json(value: Any) -> None:
    """Print a value as JSON, for scripts."""
    click.echo(printable(json.dumps(value, indent=1, default=str)))


def print_line(text: str = "") -> None:
    """Print a line."""
    click.echo(printable(text))


def print_error(text: object) -> None:
    """Print what is wrong, in one line of the error stream."""
    click.echo(f"ejkernel: {printable(' '.join(str(text).split()))}", err=True)


def config_text(cfg: object) -> str:
    """A configuration in words, without the name of its type: "" where a kernel has none.

    ``cfg`` is the configuration, its fields in a record, or its text in a provenance.

    >>> config_text({"rows": 2, "stages": None}), config_text("Config(rows=2)"), config_text(None)
    ('rows=2, stages=None', 'rows=2', '')
    """
    if isinstance(cfg, Mapping):
        return ", ".join(f"{name}={value!r}" for name, value in cfg.items())
    text = cfg if isinstance(cfg, str) else "" if cfg is None else _text(cfg)
    fields = re.fullmatch(r"[\w.]+\((.*)\)", text, re.DOTALL)
    return fields[1] if fields else text.removeprefix("None")


def _text(cfg: object) -> str:
    from ejkernel_core.extend import text_of  # imported already where there is a configuration

    return text_of(cfg)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """Print rows under their columns. Long words are folded at the width of the terminal, and nothing is cut off."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # As ``Text``: in plain ones, rich looks for its own markup.
    heading = Text(printable(title)) if title else None
    table = Table(box=box.SIMPLE_HEAD, title=heading, title_justify="left", pad_edge=False, show_edge=False)
    columns = [printable(column) for column in columns]
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    text = io.StringIO()
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False) if is_terminal else Console(file=text, width=_pipe_width(), color_system=None)
    texts_of_columns = [[column, *(row[place] for row in cells)] for place, column in enumerate(columns)]
    widths = _widths(texts_of_columns, console.width - GAP * (len(columns) - 1))
    for column, width in zip(columns, widths, strict=True):
        table.add_column(Text(column), overflow="fold", width=width)
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)
    if not is_terminal:
        click.echo("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


def _pipe_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else PIPE_WIDTH


def _widths(columns: Sequence[Sequence[str]], available: int) -> Sequence[int | None]:
    """The width of each column, which breaks no word; None where rich is to decide, because there is too little room.

    With only a smallest width of a column, rich makes tables that are too wide, and cuts them off.
    """
    widths = [_longest_word(*texts) for texts in columns]
    lines = [[len(line) for text in texts for line in text.splitlines()] for texts in columns]
    if sum(widths) > available:
        return [None] * len(widths)
    widths = [min(width, max(lengths, default=0)) for width, lengths in zip(widths, lines, strict=True)]
    for _ in range(available - sum(widths)):
        # To the column in which the most lines are too long.
        folded = [sum(length > width for length in lengths) for lengths, width in zip(lines, widths, strict=True)]
        place = folded.index(max(folded))
        widths[place] += folded[place] > 0
    return widths


def _longest_word(*texts: str) -> int:
    """The width below which a column would break a word."""
    return min(max((len(word) for text in texts for word in text.split()), default=1), MAX_WORD)
