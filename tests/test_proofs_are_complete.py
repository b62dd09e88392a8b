"""Every plugin with kernels runs the proofs of all its kernels."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[1] / "plugins"
PROJECTS = {path: tomllib.loads(path.read_text())["project"] for path in PLUGINS.glob("*/pyproject.toml")}
WITH_KERNELS = [path for path, project in PROJECTS.items() if "ejkernel.kernels" in project.get("entry-points", {})]


@pytest.mark.parametrize("path", WITH_KERNELS, ids=lambda path: path.parent.name)
def test_every_plugin_with_kernels_runs_their_proofs(path: Path) -> None:
    calls = re.compile(rf'kernel_proofs\(\s*"{PROJECTS[path]["name"]}"')
    assert any(calls.search(file.read_text()) for file in path.parent.glob("tests/test_kernels*.py"))


def test_there_are_plugins_with_kernels() -> None:
    assert len(WITH_KERNELS) >= 5
