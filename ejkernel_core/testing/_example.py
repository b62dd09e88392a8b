"""The smallest operation and kernel there are, for the examples of the checks."""

from __future__ import annotations

from typing import Any

import numpy as np

from ejkernel_core import Kernel, Registry

from ._case import Case


class Double(Kernel[None, Any]):
    """Twice its argument."""

    def run(self, x: Any, *, cfg: Any) -> Any:  # type: ignore[override]
        return 2 * x

    def heuristic_cfg(self, inv: Any) -> Any:
        return None


def double() -> tuple[Registry, str, Case]:
    """A registry of its own, the name of the kernel in it, and a case."""
    registry, kernel = Registry(plugins=""), Double()
    registry.register(kernel)
    registry.register(kernel.plugin.run, "Double.reference")
    return registry, "Double.run", Case("ones", "Double", lambda draw: {"x": np.ones(8)}, wrt=("x",))
