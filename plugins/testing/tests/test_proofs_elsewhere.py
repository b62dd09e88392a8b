"""The proofs in a project of somebody else's: plain pytest, and JAX with the one device that a CPU is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ejkernel_testing as testing
from ejkernel_testing import _processes
from ejkernel_testing._example import double

PROJECT = """
from types import SimpleNamespace

import numpy as np

from ejkernel_core import Operation, Registry, hookimpl
from ejkernel_testing import Case, KernelProofs


def kernel(compute):
    @hookimpl
    def heuristic_cfg(inv):
        return None

    @hookimpl
    def run_backend(inv, cfg):
        return compute(inv["x"])

    return SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend)


def cases():
    def arguments(draw):
        return {"x": np.random.default_rng(draw).standard_normal((8, 3))}

    return [Case("rows", "double", arguments, wrt=("x",), checks={"shard_map"}, batched=("x",))]


REGISTRY = Registry(plugins="")
REGISTRY.register(Operation(name="double", signature=lambda x: None, cases=cases))
REGISTRY.register(kernel(lambda x: 2 * x), "double.reference")
REGISTRY.register(kernel(lambda x: 2 * x), "double.right")
REGISTRY.register(kernel(lambda x: 2 * x if len(x) == 8 else 3 * x), "double.wrong_on_a_shard")


class TestRight(KernelProofs):
    kernel = "double.right"
    registry = REGISTRY


class TestWrong(KernelProofs):
    kernel = "double.wrong_on_a_shard"
    registry = REGISTRY
"""


SKIPPED = "<testsuites><testsuite><testcase><skipped/></testcase></testsuite></testsuites>"


def proved(folder: Path, **environment: str) -> str:
    """What plain pytest prints."""
    (folder / "deep").mkdir()
    (folder / "deep" / "test_double.py").write_text(PROJECT)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q --import-mode=importlib --strict-markers\n")
    inherited = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run(
        [sys.executable, "-B", "-m", "pytest", "-k", "transforms", "deep"],
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


@pytest.mark.parametrize("environment", [{}, {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}], ids=str)
def test_what_is_wrong_on_a_shard_alone_is_caught(tmp_path: Path, environment: dict[str, str]) -> None:
    printed = proved(tmp_path, **environment)
    assert re.search(r"transforms: shard_map: double.wrong_on_a_shard on rows: \S+ is off by", printed), printed
    assert "1 failed, 1 passed" in printed
    assert ("in a process with 8 devices" in printed) is (not environment)


def test_where_one_device_is_wanted_it_is_told_that_this_proves_nothing(tmp_path: Path) -> None:
    printed = proved(tmp_path, JAX_NUM_CPU_DEVICES="1")
    assert "there is one device, and nothing to cut: set JAX_NUM_CPU_DEVICES=8" in printed, printed
    assert "2 failed" in printed


def test_the_check_alone_tells_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    registry, kernel, case = double()
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:1])
    with pytest.raises(AssertionError, match=r"^transforms: shard_map: double.plain on ones: there is one device"):
        testing.transforms(registry, kernel, case, "shard_map")


@pytest.mark.parametrize(
    ("status", "report"), [(-9, None), (0, "<testsuites/>"), (0, SKIPPED)], ids=["killed", "none", "skipped"]
)
def test_a_process_that_proved_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, request: Any, status: int, report: Any
) -> None:
    def run(command: list[str], **options: Any) -> Any:
        if report is not None:
            (file,) = (word.partition("=")[2] for word in command if word.startswith("--junitxml="))
            Path(file).write_text(report)
        return SimpleNamespace(returncode=status, stdout="", stderr="")

    monkeypatch.setattr(_processes.subprocess, "run", run)
    assert _processes.run_on_several_devices(request) == f"it ended with {status}\n"
