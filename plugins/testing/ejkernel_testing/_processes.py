"""Runs one test again in a process where the CPU counts as several devices, which JAX decides when it starts."""

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

#: The environment variable with the number of devices that a CPU counts as.
VARIABLE = "JAX_NUM_CPU_DEVICES"
DEVICES = 8


def has_one_cpu() -> bool:
    """Whether JAX runs on a CPU that counts as one device, so that nothing can be sharded."""
    return jax.default_backend() == "cpu" and len(jax.devices()) == 1


def has_one_accelerator() -> bool:
    """Whether JAX runs on a single GPU or TPU, which no process can make count as several devices."""
    return jax.default_backend() != "cpu" and len(jax.devices()) == 1


def run_on_several_devices(request: pytest.FixtureRequest) -> str:
    """Run the test of the request with 8 devices. Empty if it passes; otherwise the exit status and the output."""
    _, _, test = request.node.nodeid.partition("::")
    config = request.config
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", f"--rootdir={config.rootpath}"]
        command += ["-c", str(config.inipath)] if config.inipath else []
        process = subprocess.run(
            [*command, f"{request.node.path}::{test}"],
            env=_environment(),
            cwd=config.invocation_params.dir,
            capture_output=True,
            text=True,
            check=False,
        )
        is_passed = process.returncode == 0 and _is_passed(report)
    return "" if is_passed else f"exit status {process.returncode}\n{process.stdout}{process.stderr}"


def _environment() -> dict[str, str]:
    """The environment of this process, without the variables of a pytest-xdist worker."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return {**inherited, VARIABLE: str(DEVICES)}


def _is_passed(report: Path) -> bool:
    """Whether one test ran. If it was skipped or not collected, pytest succeeds too, and nothing is proved."""
    testcases = list(ElementTree.parse(report).iter("testcase"))
    return len(testcases) == 1 and not len(testcases[0].findall("./skipped"))
