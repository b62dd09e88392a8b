"""Modules that are imported when they are first used, as attributes of their package."""

from __future__ import annotations

import importlib
from typing import Any


def submodule(package: str, name: str, names: tuple[str, ...]) -> Any:
    """The module ``name`` of a package, if it is one of ``names``; else the error of a missing attribute.

    >>> submodule("ejkernel_classes", "callib", ("callib", "ops")).__name__
    'ejkernel_classes.callib'
    """
    if name in names:
        return importlib.import_module(f".{name}", package)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
