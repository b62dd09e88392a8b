"""The environment variables of the project, from the core's module, without importing the core, which imports JAX."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def core_environment() -> ModuleType:
    """The module ``ejkernel_core.environment``, which imports nothing of the core."""
    package = importlib.util.find_spec("ejkernel_core")
    assert package is not None, "ejkernel-cli depends on ejkernel-core"
    assert package.origin is not None
    spec = importlib.util.spec_from_file_location("environment", Path(package.origin).with_name("environment.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
