"""Set before JAX starts: eight devices on any machine, for what is sharded; and how XLA compiles."""

import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

flags = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
if os.environ.get("EJKERNEL_TESTS") == "quick":
    # What a test compiles it runs once, and compiling takes longest: without optimisation, half as long or less. The
    # long sweep compiles XLA's own kernels as users do.
    flags.append("--xla_backend_optimization_level=0")
    if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # later ones know no other way
        flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(flags).strip()


@pytest.fixture
def use_registry(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Have ``ejkernel_core`` use another registry for a test."""
    import ejkernel_core

    def use(registry: Any) -> None:
        monkeypatch.setattr(ejkernel_core, "registry", registry)
        for name in ("call", "invocation", "plan", "explain"):
            monkeypatch.setattr(ejkernel_core, name, getattr(registry, name))

    return use


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes what its user has measured, or what another test has."""
    folder = tmp_path / "ejkernel-cache"
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(folder))
    import ejkernel_cache

    ejkernel_cache.default_cache.cache_clear()
    return folder
