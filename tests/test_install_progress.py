"""What `make` shows while pip installs: a few lines, and where it fails the end of what pip says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[1] / ".ci" / "install.py"


@pytest.fixture
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("Obtaining file:///home/me/ejkernel-core/plugins/ops", "reading ops"),
        ("Collecting jax>=0.10 (from ejkernel-core==0.1.0)", "looking for jax"),
        ("  Downloading jaxlib-0.10.2-cp311.whl (80.5 MB)", "downloading jaxlib-0.10.2-cp311.whl (80.5 MB)"),
        ("  Building editable for ejkernel-xla (pyproject.toml): started", "building ejkernel-xla"),
        ("Installing collected packages: mpmath, numpy, jax", "installing 3 packages"),
        ("Requirement already satisfied: jax", None),
    ],
)
def test_the_lines_of_pip_are_steps(install, line, text):
    assert install.step(line) == text


def test_steps_are_shown_now_and_then_and_the_last_one_again(install, monkeypatch, capsys):
    now = 100.0
    monkeypatch.setattr(install.time, "monotonic", lambda: now)
    progress = install.Progress()
    for second, text in ((1, "reading ops"), (5, "reading xla"), (6, "building xla"), (7, "installing 3")):
        now = 100.0 + second
        progress.show(text)
    assert capsys.readouterr().out.splitlines() == ["    5 s  reading xla", "    7 s  installing 3"]
    waits = iter([(116.0, False), (118.0, False), (119.0, True)])

    class Event(threading.Event):
        def wait(self, timeout=None):
            nonlocal now
            now, is_done = next(waits)
            return is_done

    progress.repeat(Event())
    assert capsys.readouterr().out == "   18 s  still installing 3\n"


def test_the_end_of_what_pip_says_is_shown_where_it_fails(tmp_path):
    process = subprocess.run(
        [sys.executable, FILE, "--no-index", "--dry-run", "no-such-package-of-ours"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PATH": "", "EJKERNEL_PIP_LOG": str(tmp_path / "pip.log")},
    )
    assert process.returncode == 1
    assert "No matching distribution found for no-such-package-of-ours" in process.stderr
    assert f"all that it said is in {tmp_path / 'pip.log'}" in process.stderr
