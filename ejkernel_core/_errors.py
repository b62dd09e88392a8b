"""Everything the framework raises.

EjkernelError
├── Unsupported          a kernel cannot do this invocation: the one expected exception, and how a kernel refuses
├── UnknownOperation     no installed plugin brings the operation            (also a LookupError)
├── UnknownBackend       no installed plugin brings this kernel              (also a LookupError)
├── NoKernel             every installed kernel refused, each with its reason
├── NoConfig             nothing is remembered for the call, and the policy wants no guess  (also a LookupError)
├── RecordError          a configuration that cannot be written down, or a text that is none (also a ValueError)
├── PluginError          a plugin broke the contract: named with its distribution and the reason
└── NotDifferentiable    a derivative that nothing installed can give        (also a TypeError)

What a caller gave wrongly is Python's own ``TypeError`` or ``ValueError``, and names the argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: What goes through wherever a plugin's faults are caught: the user's interrupt, and a generator that is closed. All
#: else is caught, for not every fault is an ``Exception``: a panic in Rust is none, nor is an exit or a test's skip.
PASSING = (KeyboardInterrupt, GeneratorExit)


def described(fault: BaseException) -> str:
    """The fault in words, as the last line of its traceback has it.

    >>> described(ValueError("too long"))
    'ValueError: too long'
    """
    text = message(fault)
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__


def message(fault: BaseException) -> str:
    """The text of a fault, which may be a plugin's own class and as broken as the plugin: the class's name then.

    >>> message(ValueError("too long"))
    'too long'
    """
    try:
        return str(fault)
    except PASSING:
        raise
    except BaseException:
        return type(fault).__name__


class EjkernelError(Exception):
    """The root of the tree."""


class Unsupported(EjkernelError):
    """Raised by ``heuristic_cfg``: this kernel cannot do this invocation. The message is for the user to act on."""


class UnknownOperation(EjkernelError, LookupError):
    """No plugin brings an operation of this name."""


class UnknownBackend(EjkernelError, LookupError):
    """No plugin brings a kernel of this backend for the operation."""


class NoKernel(EjkernelError):
    """No installed kernel can do the invocation; ``verdicts`` has each with its reason."""

    def __init__(self, message: str, verdicts: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.verdicts = tuple(verdicts)


class NoConfig(EjkernelError, LookupError):
    """No configuration is remembered for the invocation, and ``AutotunePolicy("error_on_miss")`` wants no heuristic."""


class RecordError(EjkernelError, ValueError):
    """A configuration cannot be written down, or a text does not hold the configuration that is asked for.

    ``damaged`` says that it is no record of any version: truncated, or something else altogether.
    """

    def __init__(self, message: str, *, damaged: bool = False) -> None:
        super().__init__(message)
        self.damaged = damaged


class PluginError(EjkernelError):
    """A plugin does not keep the contract."""


class NotDifferentiable(EjkernelError, TypeError):
    """A derivative was asked for that nothing installed can give."""
