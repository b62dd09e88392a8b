"""The smallest operation and kernel there are, for the examples of the checks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from ejkernel_core import Invocation, Operation, Registry, hookimpl

from ._case import Case


@hookimpl
def heuristic_cfg(inv: Invocation) -> None:
    """It has nothing to choose."""


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> Any:
    """Twice its argument."""
    return 2 * inv["x"]


def double() -> tuple[Registry, str, Case]:
    """A registry of its own, the name of the kernel in it, and a case."""
    registry = Registry(plugins="")
    registry.register(Operation(name="double", signature=lambda x: None))
    for backend in ("reference", "plain"):
        registry.register(SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend), f"double.{backend}")
    return registry, "double.plain", Case("ones", "double", lambda draw: {"x": np.ones(8)}, wrt=("x",))
