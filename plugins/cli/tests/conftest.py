"""Command lines, in this process or one of their own, and small distributions that are installed for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ejkernel_cli import _metadata, main
from tests.distributions import write_distribution

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """``run("list", "--json", EJKERNEL_PLUGINS="")`` runs the command in this process, where JAX and the core may be
    imported. ``path`` is a folder of distributions.
    """

    def run(*words: str, path: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        if path:
            monkeypatch.syspath_prepend(path)
            for file in Path(path).glob("*.py"):
                monkeypatch.delitem(sys.modules, file.stem, raising=False)
        _forget_metadata()
        try:
            main(list(words))
        except SystemExit as end:
            code = end.code or 0
        for name in environment:
            monkeypatch.delenv(name)
        if path:
            sys.path.remove(path)
        _forget_metadata()
        return subprocess.CompletedProcess(words, int(code), *capfd.readouterr())

    monkeypatch.delenv("EJKERNEL_PLUGINS", raising=False)
    return run


def _forget_metadata() -> None:
    _metadata._all_entry_points.cache_clear()
    _metadata.entry_points.cache_clear()


@pytest.fixture
def run_process(tmp_path: Path) -> Run:
    """The same in a process of its own, for what is decided when JAX and the core are imported."""

    def run(*words: str, path: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {name: value for name, value in os.environ.items() if not name.startswith("EJKERNEL_")}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [path, variables.get("PYTHONPATH", "")]))
        variables |= {"EJKERNEL_CACHE_DIR": str(tmp_path / "configs"), "XLA_FLAGS": "", **environment}
        return subprocess.run(
            [sys.executable, "-m", "ejkernel_cli", *words],
            env=variables, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip

    return run


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., str]:
    """``install("my-dist", {"module": source}, kernels={...})`` installs a distribution; returns its folder."""

    def install(name: str, modules: Mapping[str, str], **groups: Mapping[str, str]) -> str:
        folder = tmp_path / f"site-{name}"
        write_distribution(folder, name, {f"{module}.py": source for module, source in modules.items()}, **groups)
        return str(folder)

    return install
