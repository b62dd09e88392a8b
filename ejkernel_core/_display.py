"""Values as text for people: one short line, or a table in a notebook."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from ._errors import plugin_faults, printable

MAX_LENGTH = 160
#: The most characters of a configuration in an explanation.
MAX_CONFIG_LENGTH = 1000


def text_of(value: Any, text: Callable[[Any], str] = str) -> str:
    """The ``str`` of a value, or its type in words where that raises: the class may be a user's or a plugin's own.

    >>> text_of(1.5), text_of(10**5000)
    ('1.5', '<int, whose str raised ValueError>')
    """
    try:
        return text(value)
    except plugin_faults() as fault:
        return f"<{type(value).__qualname__}, whose {text.__name__} raised {type(fault).__name__}>"


def one_line(value: Any, max_length: int = MAX_LENGTH) -> str:
    """The text of a value without line breaks and control characters, truncated to ``max_length`` characters.

    >>> one_line(" no   kernel"), one_line("abcdefgh", 6)
    ('no kernel', 'abc...')
    """
    return _truncated(" ".join(text_of(value).split()), max_length)


def brief(value: Any, max_length: int = 60) -> str:
    """The ``repr`` of a value without line breaks and control characters, truncated to ``max_length`` characters.

    >>> brief("abc"), brief("x" * 80, 8)
    ("'abc'", "'xxxx...")
    """
    return _truncated(" ".join(text_of(value, repr).splitlines()), max_length)


def repr_of(value: Any) -> str:
    """The ``repr`` of a configuration or an option, for fields of attrs classes."""
    return brief(value, MAX_CONFIG_LENGTH)


def config_text(cfg: Any) -> str:
    """The text of a configuration in one line."""
    return one_line(cfg, MAX_CONFIG_LENGTH)


def _truncated(text: str, max_length: int) -> str:
    text = printable(text)
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def quantity(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun, in the singular or the plural.

    >>> quantity(1, "key"), quantity(2, "key"), quantity(0, "policy", "policies")
    ('1 key', '2 keys', '0 policies')
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def suggestion(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the most similar of ``names``; "" where none is similar.

    >>> suggestion("casual", ["query", "causal"]), suggestion("x", ["causal"])
    ("; did you mean 'causal'?", '')
    """
    match = most_similar(name, names)
    return f"; did you mean {match!r}?" if match else ""


def most_similar(name: str, names: Iterable[str]) -> str | None:
    """The most similar of ``names``; None where none is similar.

    >>> most_similar("casual", ["query", "causal"])
    'causal'
    """
    return next(iter(difflib.get_close_matches(name, list(names), 1)), None)


def html_table(title: str, rows: Iterable[Sequence[Any]], head: Sequence[str] = ()) -> str:
    """A table in HTML. Its cells are plain text, so they are escaped.

    >>> html_table("a < b", [("x", 1)])
    '<table><caption>a &lt; b</caption><tr><td>x</td><td>1</td></tr></table>'
    """
    cells = ["".join(f"<th>{escape(name)}</th>" for name in head)] if head else []
    cells += ["".join(f"<td>{escape(text_of(cell))}</td>" for cell in row) for row in rows]
    return f"<table><caption>{escape(title)}</caption>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def html_text(value: Any) -> str:
    """A text in HTML with its line breaks.

    >>> html_text("a < b")
    '<pre>a &lt; b</pre>'
    """
    return f"<pre>{escape(text_of(value))}</pre>"
