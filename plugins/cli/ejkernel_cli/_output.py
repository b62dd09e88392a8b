"""Tables, lines and JSON, in a terminal or a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])
#: The width of tables in a pipe, where there is no terminal to ask.
PIPE_WIDTH = 80


class Failure(click.ClickException):
    """An error that is shown in one line, which says what to do. The exit code is 1."""


def json_option(function: Function) -> Function:
    """The option ``--json``, as the parameter ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def print_json(value: Any) -> None:
    """Print a value as JSON, for scripts."""
    click.echo(json.dumps(value, indent=1, default=str))


def print_line(text: str = "") -> None:
    """Print a line as it is."""
    click.echo(text)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """Print rows under their columns. Long words are folded at the width of the terminal, and nothing is cut off."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    Console(file=sys.stdout, width=width, highlight=False).print(table)
