"""Values as a person wants to see them: one short line, and a table in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

LONGEST = 160


def one_line(value: Any, longest: int = LONGEST) -> str:
    """The text of a value without line breaks, cut where it is too long.

    >>> one_line(" no   kernel"), one_line("abcdefgh", 6)
    ('no kernel', 'abc...')
    """
    text = " ".join(str(value).split())
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def brief(value: Any, longest: int = 60) -> str:
    """The value as Python writes it, no longer than a message has room for.

    >>> brief("abc"), brief("x" * 80, 8)
    ("'abc'", "'xxxx...")
    """
    text = repr(value)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def counted(number: int, noun: str, plural: str = "") -> str:
    """So many of something.

    >>> counted(1, "key"), counted(2, "key"), counted(0, "policy", "policies")
    ('1 key', '2 keys', '0 policies')
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def html_table(title: str, rows: Iterable[Sequence[Any]]) -> str:
    """A table in HTML, whatever is in it as plain text.

    >>> html_table("a < b", [("x", 1)])
    '<table><caption>a &lt; b</caption><tr><td>x</td><td>1</td></tr></table>'
    """
    cells = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    return f"<table><caption>{escape(title)}</caption>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def html_text(value: Any) -> str:
    """A text in HTML as it is, line breaks included.

    >>> html_text("a < b")
    '<pre>a &lt; b</pre>'
    """
    return f"<pre>{escape(str(value))}</pre>"
