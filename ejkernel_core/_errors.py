"""The exceptions that the framework raises.

EjkernelError
├── Unsupported          a kernel cannot run this invocation: the one exception that is expected
├── UnknownOperation     no installed plugin provides the operation              (also a LookupError)
├── UnknownBackend       no installed plugin provides this kernel                (also a LookupError)
├── NoKernel             every installed kernel refused; the message has each reason
├── NoConfig             no store has a configuration, and the policy forbids the heuristic  (also a LookupError)
├── RecordError          a configuration cannot be written, or a text cannot be read as one  (also a ValueError)
├── PluginError          a plugin breaks the contract; the message names its distribution
├── NotDifferentiable    no installed plugin can compute this derivative         (also a TypeError)
└── UntrustedFolder      others can write to a folder of records, and the environment forbids that

A wrong argument raises Python's own ``TypeError`` or ``ValueError``, and the message names the argument.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

#: The most characters in the message of a ``RecordError``.
MAX_RECORD_FAULT = 2000
#: Before the line of a call, as in "called at model.py:31, in attention".
CALLED_AT = "called at "


def description(fault: BaseException) -> str:
    """The type and the text of an exception, as in the last line of its traceback.

    >>> description(ValueError("too long"))
    'ValueError: too long'
    """
    text = message(fault)
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__


def message(fault: BaseException) -> str:
    """The text of an exception, or the name of its class if the ``__str__`` of a plugin's exception fails.

    >>> message(ValueError("too long"))
    'too long'
    """
    try:
        return str(fault)
    except plugin_faults():
        return type(fault).__name__


def name_operation(fault: Exception, op: str) -> None:
    """Have the message of a wrong argument begin with the name of the operation. Another exception gets a note.

    >>> fault = ValueError("key: takes 4 axes")
    >>> name_operation(fault, "flash_attention")
    >>> fault
    ValueError('flash_attention: key: takes 4 axes')
    """
    if type(fault) in (TypeError, ValueError) and len(fault.args) == 1:
        if not str(fault).startswith(f"{op}: "):
            fault.args = (f"{op}: {fault}",)
    else:
        fault.add_note(f"in prepare of {op}")


def name_line(fault: BaseException, line: str | None) -> None:
    """Say in which line of the user's program the call is, once: the message of one of our errors ends with it, and
    another exception, such as one of a kernel, has a note. An interrupt is not about the call.
    """
    if isinstance(fault, EjkernelError):
        fault.name_line(line)
    elif (
        isinstance(fault, Exception)
        and line is not None
        and not any(note.startswith(CALLED_AT) for note in getattr(fault, "__notes__", ()))
    ):
        fault.add_note(f"{CALLED_AT}{line}")


def printable(text: str) -> str:
    r"""The text with an escape, as in JSON, for each character that may control a terminal or that none can show. Line
    breaks and tabs stay.

    >>> print(printable("red: " + chr(27) + "[31m"))
    red: \u001b[31m
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else _escape(c) for c in text)


def _escape(character: str) -> str:
    return "\\u007f" if character == "\x7f" else json.dumps(character)[1:-1]


class EjkernelError(Exception):
    """The base class of the framework's exceptions.

    ``line`` is that of the call in the user's program, where the exception was raised after JAX had traced it: the
    traceback does not lead there.
    """

    line: str | None = None

    def name_line(self, line: str | None) -> None:
        """Add the line of the call to the message, once."""
        if line is not None and self.line is None:
            self.line = line
            self.args = (f"{self}\n{CALLED_AT}{line}", *self.args[1:])


class Unsupported(EjkernelError):
    """A kernel cannot run an invocation. The message says what the user can do about it."""


class UnknownOperation(EjkernelError, LookupError):
    """No plugin provides an operation of this name."""


class UnknownBackend(EjkernelError, LookupError):
    """No plugin provides a kernel of this backend for the operation."""


class NoKernel(EjkernelError):
    """No installed kernel can run the invocation. ``verdicts`` has the reason of each kernel."""

    def __init__(self, message: str, verdicts: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.verdicts = tuple(verdicts)


class NoConfig(EjkernelError, LookupError):
    """No store has a configuration for the call, and ``AutotunePolicy("error_on_miss")`` forbids the heuristic."""


class RecordError(EjkernelError, ValueError):
    """A configuration cannot be written as JSON, or a text cannot be read as a configuration of the expected type.

    ``damaged`` is True where the text is not a record of any version, because it is truncated or something else.
    """

    def __init__(self, message: str, *, damaged: bool = False) -> None:
        # It may have any text of a file, and is one line of an explanation.
        text = " ".join(printable(message).splitlines())
        super().__init__(text if len(text) <= MAX_RECORD_FAULT else f"{text[: MAX_RECORD_FAULT - 3]}...")
        self.damaged = damaged


class PluginError(EjkernelError):
    """A plugin breaks the contract."""


class NotDifferentiable(EjkernelError, TypeError):
    """No installed plugin can compute this derivative."""


class UntrustedFolder(EjkernelError):
    """Others can write to a folder of records, which the environment variable EJKERNEL_CACHE_STRICT forbids."""


#: What passes through code of plugins: the user's interrupt, the closing of a generator, and what the user has asked to
#: be an error.
_NEVER_CAUGHT = (KeyboardInterrupt, GeneratorExit, UntrustedFolder)


def plugin_faults() -> tuple[type[BaseException], ...]:
    """What an ``except`` around code of a plugin catches: all but a user's interrupt, the closing of a generator, and
    ``UntrustedFolder``. Not all of it is an ``Exception``: a panic in Rust, an exit, the skip of a test.

    >>> try:
    ...     raise SystemExit("by a plugin")
    ... except plugin_faults() as fault:
    ...     print(fault)
    by a plugin
    """
    # Python evaluates this while it looks for the clause that catches the exception.
    return () if isinstance(sys.exception(), _NEVER_CAUGHT) else (BaseException,)
