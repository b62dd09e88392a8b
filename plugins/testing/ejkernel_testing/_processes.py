"""One test again, in a process of its own where the CPU is several devices: JAX decides on that when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import jax

if TYPE_CHECKING:
    import pytest

#: What tells JAX how many devices a CPU is.
VARIABLE = "JAX_NUM_CPU_DEVICES"
DEVICES = 8


def has_one_cpu() -> bool:
    """Whether there is nothing to cut arrays over, and could be."""
    return jax.default_backend() == "cpu" and len(jax.devices()) == 1


def run_on_several_devices(request: pytest.FixtureRequest) -> str:
    """Run the test that asks with 8 devices. Unless it passed: how it ended, and what it printed."""
    _, _, test = request.node.nodeid.partition("::")
    config = request.config
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", f"--rootdir={config.rootpath}"]
        command += ["-c", str(config.inipath)] if config.inipath else []
        done = subprocess.run(
            [*command, f"{request.node.path}::{test}"],
            env=_environment(),
            cwd=config.invocation_params.dir,
            capture_output=True,
            text=True,
            check=False,
        )
        passed = done.returncode == 0 and _has_passed(report)
    return "" if passed else f"it ended with {done.returncode}\n{done.stdout}{done.stderr}"


def _environment() -> dict[str, str]:
    """That of this process, without what makes a worker of pytest-xdist of it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return {**own, VARIABLE: str(DEVICES)}


def _has_passed(report: Path) -> bool:
    """Whether the one test was run: one that was skipped, or not found, has proved nothing."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    return len(cases) == 1 and not len(cases[0].findall("./skipped"))
