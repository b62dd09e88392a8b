"""A command line in a process of its own, and small distributions that are installed for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``run("list", "--json", EJKERNEL_PLUGINS="")`` runs the command in a folder of its own."""

    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {name: value for name, value in os.environ.items() if not name.startswith("EJKERNEL_")}
        paths = [environment.pop("path", ""), variables.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        variables |= {"EJKERNEL_CACHE_DIR": str(tmp_path / "configs"), "XLA_FLAGS": "", **environment}
        return subprocess.run(
            [sys.executable, "-m", "ejkernel_cli", *words],
            env=variables, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip

    return run


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., str]:
    """``install("my-dist", {"module": source}, kernels={...})`` installs a distribution; returns what is to be in PYTHONPATH."""

    def install(name: str, modules: Mapping[str, str], version: str = "1.0", **groups: Mapping[str, str]) -> str:
        folder = tmp_path / f"site-{name}"
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        sections = [
            f"[ejkernel.{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
            for group, entries in groups.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(sections))
        for module, source in modules.items():
            (folder / f"{module}.py").write_text(source)
        return str(folder)

    return install
