"""The command ``ejkernel``. Its subcommands are the entry points of the group ``ejkernel.commands``.

A subcommand is a ``click.Command``. The first line of its module's docstring is what ``ejkernel --help`` says about it,
read from the source: no subcommand is imported for that, and none imports JAX before it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._main import main
from ._output import (
    Failure,
    config_text,
    json_option,
    print_error,
    print_json,
    print_line,
    print_table,
    printable,
)
from ._permissions import writable_by_others

if TYPE_CHECKING:
    from ._calls import (
        CALL_SETTINGS,
        Call,
        CallCommand,
        call_options,
        clear_refusals,
        matching_backends,
        matching_operations,
        parse_call,
    )

__all__ = [
    "CALL_SETTINGS",
    "Call",
    "CallCommand",
    "Failure",
    "call_options",
    "clear_refusals",
    "config_text",
    "json_option",
    "main",
    "matching_backends",
    "matching_operations",
    "parse_call",
    "print_error",
    "print_json",
    "print_line",
    "print_table",
    "printable",
    "writable_by_others",
]


def __getattr__(name: str) -> Any:
    if name in __all__:  # those that are not imported above, because most subcommands take no call
        from . import _calls

        return getattr(_calls, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
