"""A minimal operation and kernel, for the examples of the checks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from ejkernel_core import Example, Invocation, Operation, Registry, hookimpl


@hookimpl
def heuristic_cfg(inv: Invocation) -> None:
    """There is nothing to configure."""


@hookimpl
def run_backend(inv: Invocation, cfg: None) -> Any:
    """Twice the argument."""
    return 2 * inv["x"]


def double() -> tuple[Registry, str, Example]:
    """A separate registry, the name of the kernel in it, and an example."""
    registry = Registry(plugins="")
    registry.register(Operation(name="double", signature=lambda x: None))
    for backend in ("reference", "plain"):
        registry.register(SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend), f"double.{backend}")
    return registry, "double.plain", Example("ones", "double", lambda draw: {"x": np.ones(8)}, wrt=("x",))
