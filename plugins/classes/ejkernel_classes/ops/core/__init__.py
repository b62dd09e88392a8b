"""``ejkernel.ops.core``: see the modules in it."""

from __future__ import annotations

from typing import Any

from ejkernel_classes._submodules import submodule


def __getattr__(name: str) -> Any:
    return submodule(__name__, name, ("kernel", "types"))
