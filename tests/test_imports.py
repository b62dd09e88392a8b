"""What importing the core does not do: load a plugin, a compiler or a test runner; change the process or the disk."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import ejkernel_core

#: Parts of a module's dotted name. JAX has a pallas inside, which importing JAX does not load.
FORBIDDEN = ("triton", "jax_triton", "pallas", "cattrs", "platformdirs", "pytest", "ejkernel_testing")
OURS = (
    "ejkernel_ops",
    "ejkernel_xla",
    "ejkernel_cudnn",
    "ejkernel_cache",
    "ejkernel_packed",
    "ejkernel_bench",
    "ejkernel_classes",
    "ejkernel_tuning",
)

EFFECTS = """
import json, os, sys

def state():
    return dict(os.environ), {name: str(value) for name, value in jax.config.values.items()}, sorted(os.listdir("."))

import jax
before = state()
import ejkernel_core
after = state()
print(json.dumps({"modules": sorted(sys.modules), "before": before, "after": after}))
"""

NOTHING_INSTALLED = """
import jax.numpy as jnp
import ejkernel_core

x = jnp.ones((1, 4, 1, 8))
try:
    ejkernel_core.call("flash_attention", x, x, x)
except ejkernel_core.UnknownOperation as error:
    print(error)
"""


def python(program: str, home: Path, **environment: str) -> str:
    """What a program prints, in a process of its own, whose home and working directory is this one."""
    # An interpreter in a virtual environment finds its packages without a home.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EJKERNEL_")}
    done = subprocess.run(
        [sys.executable, "-B", "-c", program],
        env={**clean, "HOME": str(home), **environment},
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("home")
    found = json.loads(python(EFFECTS, home))
    return {**found, "files": sorted(str(path) for path in home.rglob("*"))}


def within(modules: list[str], package: str) -> list[str]:
    """The modules that are the package or in it, wherever it is itself."""
    return [name for name in modules if f".{package}." in f".{name}."]


def plugin_packages() -> set[str]:
    """The package of every plugin that is installed here, of this repository or not."""
    groups = ("ejkernel.operations", "ejkernel.kernels", "ejkernel.policies")
    points = (point for group in groups for point in importlib.metadata.entry_points(group=group))
    return {point.module.partition(".")[0] for point in points}


def test_the_core_is_imported(imported):
    assert within(imported["modules"], "ejkernel_core")
    assert "jax" in imported["modules"]


def imported_by(tree: ast.AST) -> set[str]:
    """The top-level packages that are imported anywhere in a module: in a function or for types alone, too."""
    nodes = [*ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.partition(".")[0] for name in names}


def test_the_core_names_no_plugin_in_an_import():
    files = sorted(Path(ejkernel_core.__file__).parent.rglob("*.py"))
    assert len(files) > 20
    plugins = {f"{path.name}: {name}" for path in files for name in imported_by(ast.parse(path.read_text()))}
    assert sorted(line for line in plugins if ": ejkernel_" in line and not line.endswith(": ejkernel_core")) == []
    assert imported_by(ast.parse("def call():\n    from ejkernel_ops.flash_attention import x")) == {"ejkernel_ops"}


def test_there_are_plugins_to_leave_out():
    assert {"ejkernel_ops", "ejkernel_xla"} <= plugin_packages()


@pytest.mark.parametrize("package", [*FORBIDDEN, *OURS])
def test_it_is_not_loaded(imported, package):
    assert within(imported["modules"], package) == []


def test_no_other_plugin_is_loaded(imported):
    assert [name for package in plugin_packages() for name in within(imported["modules"], package)] == []


def test_environment_variables_stay_as_they_are(imported):
    assert imported["after"][0] == imported["before"][0]


def test_the_configuration_of_jax_stays_as_it_is(imported):
    assert imported["before"][1]
    assert imported["after"][1] == imported["before"][1]


def test_nothing_is_written(imported):
    assert imported["after"][2] == imported["before"][2] == []
    assert imported["files"] == []


def test_no_device_is_started(tmp_path):
    """Who imports the core may still want to set flags of JAX, or to fork."""
    program = "import ejkernel_core\nfrom jax._src import xla_bridge\nprint(xla_bridge.backends_are_initialized())"
    assert python(program, tmp_path).strip() == "False"


def test_a_call_loads_the_plugins_of_its_operation_alone(tmp_path):
    program = f"import sys\n{NOTHING_INSTALLED}\nprint(*sorted(sys.modules))"
    modules = python(program, tmp_path).split()
    assert within(modules, "ejkernel_ops.flash_attention.reference")
    assert within(modules, "ejkernel_bench") == []
    assert within(modules, "ejkernel_testing") == []


def test_the_core_alone_says_what_to_install(tmp_path):
    path = os.pathsep.join([str(core_metadata(tmp_path)), os.environ.get("PYTHONPATH", "")])
    said = python(NOTHING_INSTALLED, tmp_path, EJKERNEL_PLUGINS="", PYTHONPATH=path)
    assert "'flash_attention'" in said
    assert 'pip install "ejkernel-core[cpu]"' in said
    assert "EJKERNEL_PLUGINS is ''" in said


def core_metadata(home: Path) -> Path:
    """A folder with what a wheel of this core says of its extras: that of an older checkout may be installed here."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    needs = [(extra, line) for extra, lines in project["optional-dependencies"].items() for line in lines]
    info = home / "metadata" / "ejkernel_core-0.1.0.dist-info"
    info.mkdir(parents=True)
    lines = [f'Requires-Dist: {line}; extra == "{extra}"' for extra, line in needs]
    (info / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.1", "Name: ejkernel-core", "Version: 0.1.0", *lines])
    )
    return info.parent


def test_without_kernels_the_call_says_what_to_install(tmp_path):
    """The operation is there, from a distribution that brings no kernel of it."""
    folder = tmp_path / "site"
    info = folder / "only_meaning-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: only-meaning\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ejkernel.operations]\nnothing_computes_it = only_meaning:operation\n")
    (folder / "only_meaning.py").write_text(
        "import ejkernel_core\n"
        "def nothing_computes_it(x): ...\n"
        "operation = ejkernel_core.Operation(\n"
        "    name='nothing_computes_it', signature=nothing_computes_it, outputs=lambda a: (a['x'],))\n"
    )
    program = (
        "import jax.numpy as jnp, ejkernel_core\n"
        "try:\n"
        "    ejkernel_core.call('nothing_computes_it', jnp.ones(3))\n"
        "except ejkernel_core.NoKernel as error:\n"
        "    print(error)\n"
    )
    path = os.pathsep.join([str(folder), str(core_metadata(tmp_path)), os.environ.get("PYTHONPATH", "")])
    said = python(program, tmp_path, PYTHONPATH=path, EJKERNEL_PLUGINS="only-meaning")
    assert "no kernel is installed" in said
    assert 'pip install "ejkernel-core[cpu]"' in said
