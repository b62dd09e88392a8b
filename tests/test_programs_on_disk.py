"""What JAX compiles for the tests stays on disk, and is never taken for what it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

#: Compiles a function under a name, from a line of its file, and prints how often a program was read back, and its text.
PROGRAM = """
import sys
import jax
import jax.numpy as jnp

reads = []
jax.monitoring.register_event_listener(lambda event, **more: reads.append(event.endswith("cache_hits")))
name, line, factor = sys.argv[1:]
scope = {}
exec("\\n" * int(line) + f"def function(x):\\n  return jnp.sin(x) * {factor}", {"jnp": jnp}, scope)
compiled = jax.jit(jax.named_scope(name)(scope["function"])).lower(jnp.ones(3)).compile()
print(sum(reads), compiled.as_text(), compiled(jnp.ones(3)))
"""


@pytest.fixture
def root_conftest(request: pytest.FixtureRequest) -> ModuleType:
    module = request.config.pluginmanager.get_plugin(str(request.config.rootpath / "conftest.py"))
    assert isinstance(module, ModuleType)
    return module


@pytest.fixture
def settings(root_conftest: ModuleType, tmp_path: Path) -> dict[str, str]:
    """Those of the tests, for a folder that is empty."""
    settings = {name: value for name, value in os.environ.items() if name not in ("JAX_COMPILATION_CACHE_DIR", "CI")}
    root_conftest.keep_programs(tmp_path / "jax", settings)
    return settings


def compiled(settings: dict[str, str], name: str, line: int = 0, factor: int = 2) -> tuple[int, str]:
    """In a process of its own: how many programs it read back, and what it got."""
    command = [sys.executable, "-c", PROGRAM, name, str(line), str(factor)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
    reads, _, text = done.stdout.partition(" ")
    return int(reads), text


def test_a_program_is_compiled_once_and_read_back_as_it_was(settings: dict[str, str]) -> None:
    reads, text = compiled(settings, "one")
    again, same = compiled(settings, "one")
    assert again > reads
    assert same == text
    assert "jit(function)/one/sin" in text
    # A line above it is none of its content.
    assert compiled(settings, "one", line=7) == (again, text)
    # Its label is, and so is what it computes.
    other, text = compiled(settings, "other")
    assert other < again
    assert "jit(function)/other/sin" in text
    changed, text = compiled(settings, "one", factor=3)
    assert changed < again
    assert "2.52441" in text


def test_the_folder_is_of_the_flags_and_the_processor(
    root_conftest: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = {root_conftest.programs_folder(tmp_path, flags) for flags in ("--one", "--other")}
    monkeypatch.setattr(root_conftest, "processor", lambda: "flags: none")
    folders.add(root_conftest.programs_folder(tmp_path, "--one"))
    assert len(folders) == 3


@pytest.mark.parametrize("given", [{"JAX_COMPILATION_CACHE_DIR": "/his/own"}, {"CI": "true"}], ids=str)
def test_a_folder_of_the_users_is_his_and_ci_has_none(
    root_conftest: ModuleType, tmp_path: Path, given: dict[str, str]
) -> None:
    settings = dict(given)
    root_conftest.keep_programs(tmp_path, settings)
    assert settings == given


@pytest.mark.parametrize(("most", "stays"), [(30, True), (29, False)])
def test_a_folder_that_has_grown_too_large_goes(
    root_conftest: ModuleType, tmp_path: Path, most: int, stays: bool
) -> None:
    every = tmp_path / "jax"
    for name in ("old", "new"):
        (every / name).mkdir(parents=True)
        (every / name / "program").write_bytes(b"x" * 15)
    root_conftest.bound(every, most)
    assert every.exists() is stays
