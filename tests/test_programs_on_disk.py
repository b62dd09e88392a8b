"""Programs that JAX compiles for the tests are cached on disk, and are read back only for the same computation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

#: Compiles a named function at a line of a file, and prints the number of cache hits and the program's text.
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
def environ(root_conftest: ModuleType, tmp_path: Path) -> dict[str, str]:
    """The environment of the tests, with an empty cache folder."""
    settings = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE", "CI")
    environ = {name: value for name, value in os.environ.items() if name not in settings}
    root_conftest.keep_programs(tmp_path / "jax", environ)
    return environ


def compile_in_process(environ: dict[str, str], name: str, line: int = 0, factor: int = 2) -> tuple[int, str]:
    """The number of cache hits and the output, in a new process."""
    command = [sys.executable, "-c", PROGRAM, name, str(line), str(factor)]
    process = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    reads, _, text = process.stdout.partition(" ")
    return int(reads), text


@pytest.mark.long
def test_a_program_is_read_back_only_for_the_same_computation(environ: dict[str, str]) -> None:
    reads, text = compile_in_process(environ, "one")
    hits, cached_text = compile_in_process(environ, "one")
    assert hits > reads
    assert cached_text == text
    assert "jit(function)/one/sin" in text
    # The line number is not part of the content.
    assert compile_in_process(environ, "one", line=7) == (hits, text)
    # The label and the computation are.
    other_reads, text = compile_in_process(environ, "other")
    assert other_reads < hits
    assert "jit(function)/other/sin" in text
    changed_reads, text = compile_in_process(environ, "one", factor=3)
    assert changed_reads < hits
    assert "2.52441" in text


def test_flags_and_processor_determine_the_folder(
    root_conftest: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = {root_conftest.programs_folder(tmp_path, flags) for flags in ("--one", "--other")}
    monkeypatch.setattr(root_conftest, "processor", lambda: "flags: none")
    folders.add(root_conftest.programs_folder(tmp_path, "--one"))
    assert len(folders) == 3


@pytest.mark.parametrize("user_environ", [{"JAX_COMPILATION_CACHE_DIR": "/his/own"}, {"CI": "true"}], ids=str)
def test_a_folder_of_the_user_and_ci_change_nothing(
    root_conftest: ModuleType, tmp_path: Path, user_environ: dict[str, str]
) -> None:
    environ = dict(user_environ)
    root_conftest.keep_programs(tmp_path, environ)
    assert environ == user_environ


@pytest.mark.parametrize(("limit", "is_kept"), [(30, True), (29, False)])
def test_a_folder_that_is_too_large_is_deleted(
    root_conftest: ModuleType, tmp_path: Path, limit: int, is_kept: bool
) -> None:
    folder = tmp_path / "jax"
    for name in ("old", "new"):
        (folder / name).mkdir(parents=True)
        (folder / name / "program").write_bytes(b"x" * 15)
    root_conftest.bound(folder, limit)
    assert folder.exists() is is_kept


#: A call on sharded arrays, by a kernel that multiplies with a factor from the command line. Prints the number of cache
#: hits and the results.
SHARDED_PROGRAM = """
import sys
from types import SimpleNamespace
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from ejkernel_core import Axes, Operation, Registry, hookimpl

hits = []
jax.monitoring.register_event_listener(lambda event, **more: hits.append(event.endswith("cache_hits")))
kind, factor = AxisType[sys.argv[1]], float(sys.argv[2])

@hookimpl
def run_backend(inv, cfg):
    return inv["x"] * factor

axes = Axes({"x": "rows dim"}, {"out": "rows dim"}, independent="rows", whole="dim")
registry = Registry(plugins="")
registry.register(Operation(name="scale", signature=lambda x: None, axes=axes))
registry.register(SimpleNamespace(run_backend=run_backend, OPAQUE=("cpu",)), "scale.opaque")
mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
x = jax.device_put(jnp.arange(8.0).reshape(4, 2), NamedSharding(mesh, PartitionSpec("x")))
hits.clear()
out = jax.jit(lambda x: registry.call("scale", x))(x)
print(sum(hits), out.tolist())
"""


@pytest.mark.long
@pytest.mark.parametrize(("kind", "expected_hits"), [("Explicit", [0, 1, 0]), ("Auto", [0, 0, 0])])
def test_a_sharded_program_never_runs_an_older_choice(
    environ: dict[str, str], kind: str, expected_hits: list[int]
) -> None:
    """The third process chooses another kernel. Programs with automatic axes are never read back."""
    hits = []
    for factor in (2.0, 2.0, 7.0):
        command = [sys.executable, "-c", SHARDED_PROGRAM, kind, str(factor)]
        process = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        count, _, results = process.stdout.partition(" ")
        assert results.strip() == str([[factor * i, factor * (i + 1)] for i in range(0, 8, 2)])
        hits.append(int(count))
    assert hits == expected_hits
