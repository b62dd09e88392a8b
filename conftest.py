"""Set before JAX starts: eight devices on any machine, for what is sharded."""

import os
from pathlib import Path

import pytest

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes what its user has measured, or what another test has."""
    folder = tmp_path / "ejkernel-cache"
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(folder))
    import ejkernel_cache

    ejkernel_cache.default_cache.cache_clear()
    return folder
